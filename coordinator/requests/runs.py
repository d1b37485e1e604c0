"""What people ask of runs, and the answers: start (also dry), list, show, stop, where a model lies."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.results import environment, similarity_record
from coordinator.results.reference_bytes import whole_model_bytes
from coordinator.rounds import evaluation
from coordinator.rounds.eligibility import Obstacle
from coordinator.rounds.machine import RunMachine
from coordinator.run_check import check_run
from coordinator.store.rows import SERVER, EvaluationRow, LeaseRow, LeftOutRow, RoundRow, RunRow
from edge_client.config.run_file import RunFile
from edge_client.config.task_files import MAX_TASK_BYTES
from edge_client.errors import ConflictError, InputError, NoSuchNameError, PayloadError
from edge_client.records import from_map, to_map

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = ["RunCommands"]

Json = dict[str, Any]

_SHOWN_MODELS = 1001  # with the first one, all of a run of a thousand rounds
_SHOWN_ROUNDS = 50
_SHOWN_FAILURES = 20
_SHOWN_UPDATES = 1000
_DRY = "dry"


class RunCommands:
    """Requests about runs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def known(self) -> dict[str, Callable[..., Json]]:
        """Requests by name."""
        return {
            "run-start": self._start,
            "run-list": self._list,
            "run-show": self._show,
            "run-stop": self._stop,
            "run-model": self._model,
        }

    # start

    def _start(self, file: Json, task_source: str = "", dry: bool = False) -> Json:
        """`task_source`: the text of the task's file, kept with the run and loaded from there."""
        try:
            parsed = from_map(RunFile, file, where="run")
        except PayloadError as error:
            raise InputError(error.detail) from None
        check_run(parsed)
        conductor, store = self._service.conductor, self._service.store
        if parsed.init != "random":
            conductor.model_named(parsed.init.removeprefix("run:"))
        _check_test_data(parsed, self._service.test_data)
        if dry:
            self._make_room(parsed.name)
        source = task_source.encode()
        name = f"{parsed.name}-{_DRY}" if dry else parsed.name
        row = RunRow(
            id=f"{name}-{store.runs.next_number(name)}",
            file=to_map(parsed),
            task_sha256=_task_hash(parsed, source),
            dry=dry,
            environment=environment.describe(),
            created_s=int(time.time()),
        )
        if row.task_sha256:
            self._service.blobs.write(source, row.task_sha256, point="task")
        store.runs.add(row)
        return {"run": row.id, "waits_for": self._waits_for(row.id)}

    def _make_room(self, name: str) -> None:
        """A dry run asks the devices, so none may train; the answers of older ones are of no use any more."""
        store = self._service.store
        for run in store.runs.all():
            if run.state in ("queued", "running"):
                raise ConflictError(
                    f"run {run.id!r} is {run.state}, and a dry run needs the devices; "
                    f"wait for it, or end it: coordinator run stop {run.id}"
                )
        for run in [run for run in store.runs.all() if run.dry and run.file["name"] == name]:
            self._service.conductor.forget(run)

    def _waits_for(self, run_id: str) -> str | None:
        before = [run.id for run in self._service.store.runs.all() if run.state in ("queued", "running")]
        return before[0] if before and before[0] != run_id else None

    # list, stop

    def find(self, name: str) -> RunRow:
        """The run that a person names: id, unique prefix or latest; raises `NoSuchNameError`."""
        runs = self._service.store.runs.all()
        real = [run for run in runs if not run.dry]
        if name == "latest" and real:
            return real[-1]
        exact = [run for run in runs if run.id == name]
        found = exact or [run for run in real if run.id.startswith(name)]
        if len(found) > 1:
            several = ", ".join(run.id for run in found)
            raise NoSuchNameError(f"run {name!r} may be any of {several}; name one of them, or latest")
        if not found or not name:
            raise NoSuchNameError.of("run", name, [run.id for run in real])
        return found[0]

    def _list(self) -> Json:
        return {"runs": [self._line(run) for run in self._service.store.runs.all() if not run.dry]}

    def _line(self, run: RunRow) -> Json:
        store = self._service.store
        model, file = store.models.last(run.id), from_map(RunFile, run.file)
        best = store.models.get(run.id, run.best_version) if run.best_version is not None else None
        return {
            "run": run.id,
            "state": run.state,
            "reason": run.reason,
            "round": model.version if model else 0,
            "rounds": file.stop.rounds,
            "method": file.method.name,
            "model": file.what,
            "metric": file.stop.metric,
            "best_version": run.best_version,
            "best_score": best.score if best else None,
            "waits_for": self._waits_for(run.id) if run.state == "queued" else None,
        }

    def _stop(self, run: str, now: bool = False) -> Json:
        row = self.find(run)
        if row.state in ("queued", "running"):
            self._service.conductor.stop(row.id, at_once=now)
        return {"run": row.id, "state": row.state}

    def _model(self, run: str, version: str = "last") -> Json:
        """Where a kept model lies, and all that is needed to build it, for a command on this machine."""
        row = self.find(run)
        if version not in ("best", "last") and not (version.isascii() and version.isdigit()):
            raise InputError(f"--version: expected a number, best or last, got {version!r}")
        found = self._service.conductor.model_named(f"{row.id}@{version}", option="--version")
        blobs = self._service.blobs
        return {
            "run": row.id,
            "file": dict(row.file),
            "task": str(blobs.path(row.task_sha256)) if row.task_sha256 else None,
            "version": found.version,
            "sha256": found.sha256,
            "path": str(blobs.path(found.sha256)),
        }

    # show

    def _show(self, run: str, newest: int = 200, report: bool = False) -> Json:
        """`newest` evaluations and rounds' bytes and, of a long run, the newest models: the counts tell how many.

        `report`: also what a page about the run needs, and nobody who watches it.
        """
        row = self.find(run)
        store = self._service.store
        kept = store.models.all(row.id)
        versions = store.evaluations.versions(row.id)
        shown = versions[-newest:] if newest > 0 else []
        judged = {version: store.evaluations.all(row.id, version) for version in shown}
        rounds = store.rounds.all(row.id)
        return {
            **self._line(row),
            "dry": row.dry,
            "file": dict(row.file),
            "environment": dict(row.environment),
            "created_s": row.created_s,
            "models": [
                {"version": m.version, "sha256": m.sha256, "bytes": m.length, "score": m.score}
                for m in kept[-_SHOWN_MODELS:]
            ],
            "num_models": len(kept),
            "payload_bytes": kept[-1].sent_length if kept else None,
            "evaluations": _summaries(row, judged),
            "num_evaluations": len(versions),
            "device_evaluations": [_judged(e) for rows in judged.values() for e in rows],
            "round_rows": [to_map(r) for r in rounds[-_SHOWN_ROUNDS:]],
            "moved_by_round": _moved_by_round(rounds)[-newest:] if newest > 0 else [],
            "leases": self._leases(row),
            "failures": [_failure(lease) for lease in store.leases.run_failures(row.id, _SHOWN_FAILURES)],
            "left_out": self._lacks(row),
            "devices": self._devices(row),
            "barred": self._barred(from_map(RunFile, row.file)),
            "progress": self._progress(row),
            **(self._for_report(row) if report else {}),
        }

    def _lacks(self, run: RunRow) -> list[Json]:
        """What the run has to do without."""
        store = self._service.store
        versions = store.evaluations.versions(run.id)
        untested = evaluation.untested(store.evaluations.all(run.id, versions[-1])) if versions else None
        return [_left_out(found) for found in (untested, *store.rounds.left_out(run.id)) if found is not None]

    def _for_report(self, run: RunRow) -> Json:
        store = self._service.store
        counted = store.updates.counts(run.id)
        similarity = similarity_record.parse(store.settings.get(similarity_record.setting_of(run.id)))
        return {
            "updates_by_round": [{"round": number, "num_updates": count} for number, count in counted.items()],
            "whole_model_bytes": self._whole_model_bytes(run),
            "similarity": to_map(similarity),
        }

    def _whole_model_bytes(self, run: RunRow) -> int | None:
        """None before there is a model, or when its file is lost."""
        model = self._service.store.models.last(run.id)
        try:
            path = self._service.blobs.path(model.sha256) if model is not None else None
            return whole_model_bytes(path, from_map(RunFile, run.file).rounds.codec) if path is not None else None
        except (OSError, PayloadError):
            return None

    def _leases(self, run: RunRow) -> list[Json]:
        """The open or newest round's leases; their logs are among the failures."""
        last = self._service.store.rounds.last(run.id)
        rows: list[LeaseRow] = self._service.store.leases.of_attempt(run.id, last.number, last.attempt) if last else []
        return [{**to_map(lease), "log": []} for lease in rows]

    def _devices(self, run: RunRow) -> list[Json]:
        """Per device: its newest report, what it sent and got, and what it is.

        Peak, prediction and budget are of the round in which it came nearest to its budget, which may change.
        """
        store = self._service.store
        traffic, remembered = store.traffic.by_device(run.id), store.runs.device_info(run.id)
        live = self._service.traffic.moved if self._is_active(run.id) else {}
        devices: dict[str, Json] = {}
        for update in store.updates.recent(run.id, _SHOWN_UPDATES):
            plan = update.report.plan
            memory = {
                "peak_bytes": update.report.peak_bytes,
                "predicted_bytes": plan.predicted_bytes if plan else 0,
                "budget_bytes": plan.budget_bytes if plan else 0,
            }
            first = {"id": update.device, **memory, "inside_budget": True, "replans": 0}
            entry = devices.setdefault(update.device, first)
            if _nearness(memory) >= _nearness(entry):
                entry |= memory
            entry["inside_budget"] &= plan is None or update.report.peak_bytes <= plan.budget_bytes
            entry["replans"] += int(min(max(0.0, update.report.scalars.get("replans", 0.0)), 1e6))  # a device's word
            entry["plan"] = plan.describe() if plan else ""
            entry["plan_details"] = to_map(plan)
            entry["base_bytes"] = update.report.base_bytes
            entry["num_samples"] = update.report.num_samples or update.report.num_held
            entry["num_test"] = update.report.num_test
            entry["versions"] = dict(update.report.versions)
            entry["round"] = update.round
        for name, entry in devices.items():
            up, down = traffic.get(name, (0, 0))
            more = live.get(name, (0, 0))
            entry["bytes_up"], entry["bytes_down"] = up + more[0], down + more[1]
            entry.update(remembered.get(name, {}))
        return [devices[name] for name in sorted(devices)]

    def _is_active(self, run_id: str) -> bool:
        active = self._service.conductor.run
        return active is not None and active.id == run_id

    def _progress(self, run: RunRow) -> Json | None:
        """How the active run stands now, and which devices it can ask; None of another run."""
        machine = self._service.conductor.machine
        if machine is None or machine.run != run.id:
            return None
        candidates = self._candidates(machine)
        num_able = sum(candidate["code"] == "" for candidate in candidates)
        waiting = ""
        if machine.phase == "SELECTING" and num_able < machine.file.devices.min:
            waiting = f"waits for devices: {machine.file.devices.min} are needed, {num_able} can take part"
        return {
            "phase": machine.phase,
            "round": machine.number,
            "waiting": waiting or self._service.paused,
            "candidates": candidates,
        }

    def _barred(self, file: RunFile) -> list[Json]:
        """Enrolled devices that this run cannot ask now, and why."""
        service = self._service
        online = service.roster.online(time.monotonic())
        rows = []
        for device in service.store.devices.all():
            offline = Obstacle("offline", "not connected")
            found = service.conductor.obstacle(file, device.name) if device.name in online else offline
            if found is not None:
                rows.append({"id": device.name, "code": found.code, "detail": found.detail})
        return rows

    def _candidates(self, machine: RunMachine) -> list[Json]:
        """Every enrolled device: code and detail tell why it is not asked; empty if it is."""
        barred = {row["id"]: row for row in self._barred(machine.file)}
        names = [device.name for device in self._service.store.devices.all()]
        return [barred.get(name, {"id": name, "code": machine.excluded.get(name, ""), "detail": ""}) for name in names]


def _check_test_data(file: RunFile, simulated: str) -> None:
    """The server's own test data must be there before the devices are asked for anything."""
    if file.evaluate.on == "simulate" and not simulated:
        raise InputError('evaluate.on = "simulate" is for `coordinator simulate`; say devices, or npz:PATH')
    path = Path(simulated if file.evaluate.on == "simulate" else file.evaluate.on.removeprefix("npz:"))
    if file.evaluate.on != "devices" and not path.is_file():
        raise InputError(f"evaluate.on: expected an npz file on the server, {path} is none")


def _task_hash(file: RunFile, source: bytes) -> str:
    """The hash of the task's source, which the run file must name; empty for a built-in model."""
    if file.task is None:
        return ""
    found = hashlib.sha256(source).hexdigest()
    if not 0 < len(source) <= MAX_TASK_BYTES:
        raise InputError(f"task {file.task.name!r}: expected a file of 1 to {MAX_TASK_BYTES} bytes, got {len(source)}")
    if file.task.sha256 != found:
        raise InputError(
            f"task {file.task.name!r}: the run file says sha256 {file.task.sha256 or 'nothing'!r}, the file has {found}"
        )
    return found


def _summaries(run: RunRow, judged: Mapping[int, list[EvaluationRow]]) -> list[Json]:
    num_classes = len(run.file["classes"])
    results = (evaluation.summarize(version, rows, num_classes) for version, rows in judged.items())
    return [
        {**to_map(result), "per_architecture": evaluation.per_architecture(judged[result.version])}
        for result in results
        if result is not None
    ]


def _judged(row: EvaluationRow) -> Json:
    return {
        "version": row.version,
        "device": "server" if row.device == SERVER else row.device,
        "slice": row.slice,
        "num_samples": row.num_samples,
        "accuracy": row.num_correct / row.num_samples if row.num_samples else None,
    }


def _nearness(memory: Json) -> tuple[float, int]:
    """How near a peak is to its budget; without one, how high it is."""
    peak, budget = memory["peak_bytes"], memory["budget_bytes"]
    return (peak / budget if budget else 0.0), peak


def _moved_by_round(rounds: Sequence[RoundRow]) -> list[Json]:
    """What travelled between the announcement of the round before and its own; rounds of old layouts do not tell."""
    totals = {0: (0, 0)}
    for row in rounds:
        if row.state == "ANNOUNCED" and row.bytes_up is not None and row.bytes_down is not None:
            totals[row.number] = (row.bytes_up, row.bytes_down)
    return [
        {"round": number, "bytes_up": up - totals[number - 1][0], "bytes_down": down - totals[number - 1][1]}
        for number, (up, down) in sorted(totals.items())
        if number - 1 in totals
    ]


def _left_out(row: LeftOutRow) -> Json:
    return {"device": row.device or None, "round": row.round, "code": row.code, "detail": row.detail}


def _failure(lease: LeaseRow) -> Json:
    names = ("device", "round", "attempt", "state", "code", "detail", "log")
    return {name: to_map(getattr(lease, name)) for name in names}
