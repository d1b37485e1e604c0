"""Runs as people see them: in a line, and in detail with results, devices, failures and what they wait for.

Covers: reading the store and a picture. Does not cover: which run is meant (`coordinator.requests.runs`), what is
shown on a screen or a page (`coordinator.cli`, `coordinator.report`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from coordinator.results import similarity_record
from coordinator.results.reference_bytes import whole_model_bytes
from coordinator.rounds import evaluation
from coordinator.rounds.eligibility import Obstacle, obstacle
from coordinator.run_details import (
    Candidate,
    DeviceEvaluation,
    FailedLease,
    LeftOut,
    ModelVersion,
    RoundAttempt,
    RoundTraffic,
    RoundUpdates,
    RunDetails,
    RunDevice,
    RunLease,
    RunLine,
    RunProgress,
    VersionResult,
)
from coordinator.server.picture import Picture
from coordinator.store.base import Store
from coordinator.store.rows import SERVER, EvaluationRow, LeaseRow, LeftOutRow, ModelRow, RoundRow, RunRow, UpdateRow
from edge_client.config.run_file import RunFile
from edge_client.errors import PayloadError
from edge_client.records import DeviceProfile, Report, from_map, to_map
from edge_client.transport.blobs import BlobStore

__all__ = ["RunOverview", "waits_for"]

_SHOWN_MODELS = 1001  # with the first one, all of a run of a thousand rounds
_SHOWN_ROUNDS = 50
_SHOWN_FAILURES = 20
_SHOWN_UPDATES = 1000
_SHOWN_DEVICES = 1000  # that a run cannot ask, or can
_SHOWN_NEWS = 20  # versions
_OFFLINE = Obstacle("offline", "not connected")


def waits_for(store: Store, run_id: str) -> str | None:
    """The run that trains before this one gets its turn."""
    open_runs = [run.id for run in store.runs.all() if run.state in ("queued", "running")]
    return open_runs[0] if open_runs and open_runs[0] != run_id else None


class RunOverview:
    """What the store and a picture of the federation tell of a run; nothing here belongs to the loop."""

    def __init__(self, store: Store, picture: Picture | None, blobs: BlobStore) -> None:
        """Only details need a picture."""
        self._store = store
        self._given_picture = picture
        self._blobs = blobs

    @property
    def _picture(self) -> Picture:
        assert self._given_picture is not None
        return self._given_picture

    def line(self, run: RunRow) -> RunLine:
        """A run in a line."""
        return RunLine(**self._facts(run, from_map(RunFile, run.file)))

    def _facts(self, run: RunRow, file: RunFile) -> dict[str, Any]:
        """The arguments of `RunLine`, with which those of `RunDetails` begin."""
        models = self._store.models
        last = models.last(run.id)
        best = models.get(run.id, run.best_version) if run.best_version is not None else None
        return {
            "run": run.id,
            "state": run.state,
            "reason": run.reason,
            "round": last.version if last else 0,
            "rounds": file.stop.rounds,
            "method": file.method.name,
            "model": file.what,
            "metric": file.stop.metric,
            "best_version": run.best_version,
            "best_score": best.score if best else None,
            "waits_for": waits_for(self._store, run.id) if run.state == "queued" else None,
        }

    def details(self, run: RunRow, *, newest: int, report: bool) -> RunDetails:
        """The `newest` evaluations and rounds' bytes and, of a long run, the newest models; counts of all.

        `report`: also what a page about the run needs, and nobody who watches it.
        """
        store, file = self._store, from_map(RunFile, run.file)
        models = store.models.all(run.id)
        versions = store.evaluations.versions(run.id)
        shown_versions = versions[-newest:] if newest > 0 else []
        judged = {version: store.evaluations.all(run.id, version) for version in shown_versions}
        rounds = store.rounds.all(run.id)
        return RunDetails(
            **self._facts(run, file),
            dry=run.dry,
            file=file,
            environment=run.environment,
            created_s=run.created_s,
            models=tuple(_version(model) for model in models[-_SHOWN_MODELS:]),
            num_models=len(models),
            payload_bytes=models[-1].sent_length if models else None,
            evaluations=tuple(_results(judged, len(file.classes))),
            num_evaluations=len(versions),
            device_evaluations=tuple(_device_evaluation(row) for rows in judged.values() for row in rows),
            round_rows=tuple(_attempt(row) for row in rounds[-_SHOWN_ROUNDS:]),
            moved_by_round=tuple(moved_by_round(rounds)[-newest:] if newest > 0 else ()),
            leases=self._leases(run),
            failures=tuple(_failure(lease) for lease in store.leases.run_failures(run.id, _SHOWN_FAILURES)),
            left_out=self._left_out(run, versions),
            devices=self._devices(run),
            barred=tuple(islice(self._barred(file), _SHOWN_DEVICES)),
            progress=self._progress(run, file),
            **(self._for_report(run, file) if report else {}),
        )

    def news(self, run: RunRow, *, after: int) -> RunDetails:
        """What somebody who watches the run does not know yet: results after this version, and no list that grows."""
        store, file = self._store, from_map(RunFile, run.file)
        models = store.models.scored_after(run.id, after, _SHOWN_NEWS)
        judged = {model.version: store.evaluations.all(run.id, model.version) for model in models}
        return RunDetails(
            **self._facts(run, file),
            dry=run.dry,
            file=file,
            environment={},
            created_s=run.created_s,
            models=tuple(_version(model) for model in models),
            num_models=0,
            payload_bytes=None,
            evaluations=tuple(_results(judged, len(file.classes))),
            num_evaluations=0,
            device_evaluations=(),
            round_rows=(),
            moved_by_round=(),
            leases=(),
            failures=tuple(_failure(lease) for lease in store.leases.run_failures(run.id, _SHOWN_FAILURES)),
            left_out=(),
            devices=(),
            barred=(),
            progress=self._progress(run, file),
        )

    def _for_report(self, run: RunRow, file: RunFile) -> dict[str, Any]:
        """The arguments of `RunDetails` that only a report needs."""
        store = self._store
        counts = store.updates.counts(run.id)
        similarity = similarity_record.parse(store.settings.get(similarity_record.setting_of(run.id)))
        return {
            "updates_by_round": tuple(RoundUpdates(round=number, num_updates=n) for number, n in counts.items()),
            "whole_model_bytes": self._whole_model_bytes(run, file),
            "similarity": to_map(similarity),
        }

    def _whole_model_bytes(self, run: RunRow, file: RunFile) -> int | None:
        """None before there is a model, or when its file is lost."""
        model = self._store.models.last(run.id)
        try:
            path = self._blobs.path(model.sha256) if model is not None else None
            return whole_model_bytes(path, file.rounds.codec) if path is not None else None
        except (OSError, PayloadError):
            return None

    def _left_out(self, run: RunRow, versions: Sequence[int]) -> tuple[LeftOut, ...]:
        store = self._store
        untested = evaluation.untested(store.evaluations.all(run.id, versions[-1])) if versions else None
        rows: list[LeftOutRow] = [untested] if untested is not None else []
        return tuple(
            LeftOut(device=row.device or None, round=row.round, code=row.code, detail=row.detail)
            for row in (*rows, *store.rounds.left_out(run.id))
        )

    def _leases(self, run: RunRow) -> tuple[RunLease, ...]:
        """The open or newest round's leases; their logs are among the failures."""
        store = self._store
        last = store.rounds.last(run.id)
        rows = store.leases.of_attempt(run.id, last.number, last.attempt) if last is not None else []
        return tuple(_lease(row) for row in rows)

    def _devices(self, run: RunRow) -> tuple[RunDevice, ...]:
        """Each device that sent an update: its newest report, what it sent and got, and what it is."""
        store = self._store
        stored, profiles = store.traffic.by_device(run.id), store.runs.device_info(run.id)
        updates: dict[str, list[UpdateRow]] = {}
        for update in store.updates.recent(run.id, _SHOWN_UPDATES):
            updates.setdefault(update.device, []).append(update)
        devices = []
        for name in sorted(updates):
            devices.append(_device(updates[name], stored.get(name, (0, 0)), profiles.get(name, {})))
        return tuple(devices)

    def _progress(self, run: RunRow, file: RunFile) -> RunProgress | None:
        """How the open run stands now, and which devices it can ask; None of another run."""
        shown = self._picture.run
        if shown is None or shown.run != run.id or not shown.phase or shown.round is None or run.state != "running":
            return None
        barred = {candidate.id: candidate for candidate in self._barred(file)}
        devices = self._picture.devices
        num_able = sum(name not in barred and not device.excluded for name, device in devices.items())
        waiting = ""
        if shown.phase == "SELECTING" and num_able < file.devices.min:
            waiting = f"waits for devices: {file.devices.min} are needed, {num_able} can take part"
        candidates = (
            barred.get(name) or Candidate(id=name, code=device.excluded, detail="") for name, device in devices.items()
        )
        return RunProgress(
            phase=shown.phase,
            round=shown.round,
            waiting=waiting or self._picture.paused,
            candidates=tuple(islice(candidates, _SHOWN_DEVICES)),
            num_candidates=len(devices),
        )

    def _barred(self, file: RunFile) -> Iterator[Candidate]:
        """Enrolled devices that this run cannot ask now, and why."""
        for name, device in self._picture.devices.items():
            barred = obstacle(file, labels=device.labels, tasks=device.tasks) if device.is_online else _OFFLINE
            if barred is not None:
                yield Candidate(id=name, code=barred.code, detail=barred.detail)


def _results(judged: Mapping[int, Sequence[EvaluationRow]], num_classes: int) -> Iterable[VersionResult]:
    for version, rows in judged.items():
        result = evaluation.summarize(version, rows, num_classes)
        if result is not None:
            yield VersionResult(
                version=result.version,
                num_devices=result.num_devices,
                num_samples=result.num_samples,
                accuracy=result.accuracy,
                loss=result.loss,
                balanced_accuracy=result.balanced_accuracy,
                macro_f1=result.macro_f1,
                recall=result.recall,
                per_architecture=evaluation.per_architecture(rows),
            )


def _version(row: ModelRow) -> ModelVersion:
    return ModelVersion(version=row.version, sha256=row.sha256, bytes=row.length, score=row.score)


def _device_evaluation(row: EvaluationRow) -> DeviceEvaluation:
    return DeviceEvaluation(
        version=row.version,
        device="server" if row.device == SERVER else row.device,
        slice=row.slice,
        num_samples=row.num_samples,
        accuracy=row.num_correct / row.num_samples if row.num_samples else None,
    )


def _device(updates: Sequence[UpdateRow], moved: tuple[int, int], info: Mapping[str, Any]) -> RunDevice:
    """A device by its updates, the oldest first."""
    newest = updates[-1]
    plan, report = newest.report.plan, newest.report
    tightest = max(reversed(updates), key=_nearness_to_budget).report
    memory = tightest.memory
    return RunDevice(
        id=newest.device,
        peak_bytes=memory.peak_bytes,
        peak_rss_bytes=tightest.peak_bytes,
        predicted_bytes=memory.predicted_bytes,
        budget_bytes=memory.budget_bytes,
        inside_budget=all(_is_inside(update.report) for update in updates),
        accelerator_peak_bytes=max(update.report.accelerator_peak_bytes for update in updates),
        replans=sum(_replans(update) for update in updates),
        plan=plan.describe() if plan else "",
        plan_details=plan,
        base_bytes=report.memory.base_bytes,
        num_samples=report.num_samples or report.num_held,
        num_test=report.num_test,
        versions=report.versions,
        round=newest.round,
        bytes_up=moved[0],
        bytes_down=moved[1],
        client=info.get("client"),
        profile=from_map(DeviceProfile, info["profile"]) if "profile" in info else None,
        labels=info.get("labels"),
    )


def _is_inside(report: Report) -> bool:
    """Of the host's budget, and of the accelerator's where that is another one; else both are in one sum."""
    plan, memory = report.plan, report.memory
    if plan is None:
        return True
    if plan.accelerator and not plan.accelerator_budget_bytes:
        return memory.peak_bytes + report.accelerator_peak_bytes <= memory.budget_bytes
    on_accelerator = report.accelerator_peak_bytes <= plan.accelerator_budget_bytes or not plan.accelerator
    return memory.is_inside and on_accelerator


def _nearness_to_budget(update: UpdateRow) -> tuple[float, int]:
    """The peak as a share of the budget; without a budget, how high the peak is."""
    memory = update.report.memory
    return (memory.peak_bytes / memory.budget_bytes if memory.budget_bytes else 0.0), memory.peak_bytes


def _replans(update: UpdateRow) -> int:
    """How often the worker changed its plan; the device says so, and may say anything."""
    return int(min(max(0.0, update.report.scalars.get("replans", 0.0)), 1e6))


def _attempt(row: RoundRow) -> RoundAttempt:
    return RoundAttempt(
        run=row.run,
        number=row.number,
        attempt=row.attempt,
        state=row.state,
        goal=row.goal,
        quorum=row.quorum,
        remaining_s=row.remaining_s,
        extended=row.extended,
        reason=row.reason,
        elapsed_s=row.elapsed_s,
        bytes_up=row.bytes_up,
        bytes_down=row.bytes_down,
        num_available=row.num_available,
    )


def _lease(row: LeaseRow) -> RunLease:
    return RunLease(
        id=row.id,
        issue=row.issue,
        epoch=row.epoch,
        run=row.run,
        round=row.round,
        attempt=row.attempt,
        device=row.device,
        train=row.train,
        evaluate=row.evaluate,
        version=row.version,
        slice=row.slice,
        plan=row.plan,
        state=row.state,
        code=row.code,
        detail=row.detail,
    )


def _failure(row: LeaseRow) -> FailedLease:
    return FailedLease(
        device=row.device,
        round=row.round,
        attempt=row.attempt,
        state=row.state,
        code=row.code,
        detail=row.detail,
        log=tuple(row.log),
    )


def moved_by_round(rounds: Sequence[RoundRow]) -> list[RoundTraffic]:
    """What travelled between the announcement of the round before and its own; rounds of old layouts do not tell."""
    totals = {0: (0, 0)}
    for row in rounds:
        if row.state == "ANNOUNCED" and row.bytes_up is not None and row.bytes_down is not None:
            totals[row.number] = (row.bytes_up, row.bytes_down)
    return [
        RoundTraffic(round=number, bytes_up=up - totals[number - 1][0], bytes_down=down - totals[number - 1][1])
        for number, (up, down) in sorted(totals.items())
        if number - 1 in totals
    ]
