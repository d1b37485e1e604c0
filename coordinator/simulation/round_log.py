"""The record of a simulation's rounds: a line for each in `rounds.jsonl`, and the summary of all.

A line is written once, when the round's model was evaluated (or is not to be). Its bytes are those that travelled
between the announcement of the version before and of this one, by the coordinator's count, so that a killed simulation
continues to count where it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coordinator.results import similarity_record
from coordinator.results.run_directory import RunDirectory
from coordinator.rounds import evaluation
from coordinator.store.base import Store
from coordinator.store.rows import EvaluationRow, UpdateRow
from edge_client.config.run_file import RunFile
from edge_client.device import meter

__all__ = ["RoundLog"]

Json = dict[str, Any]


class RoundLog:
    """The lines so far, and the state that the next ones need."""

    def __init__(self, file: RunFile, store: Store, directory: RunDirectory, budgets: Mapping[str, int | None]) -> None:
        self._file = file
        self._store = store
        self._directory = directory
        self._budgets = budgets
        self._lines = directory.rounds()
        self._totals: dict[int, tuple[int, int]] = {}  # version -> bytes up and down when it was announced
        self._line_at = time.monotonic()

    @property
    def num_rounds(self) -> int:
        """How many rounds have a line."""
        return len(self._lines)

    def announced(self, run: str, version: int) -> None:
        """Note the announcement of a version: all bytes until now belong to its round."""
        self._totals.setdefault(version, self._total(run))

    def _total(self, run: str) -> tuple[int, int]:
        moved = self._store.traffic.by_device(run).values()
        return sum(up for up, _ in moved), sum(down for _, down in moved)

    def write(self, run: str, *, over: bool) -> Iterator[Json]:
        """Write the lines that are due, and return them; `over`: the run has ended."""
        while (version := len(self._lines) + 1) in self._totals or over:
            if self._store.models.get(run, version) is None or not (over or self._is_judged(run, version)):
                return
            line = self._line(run, version, last=over and self._store.models.get(run, version + 1) is None)
            self._keep_similarity(run, version)
            self._directory.add_round(line)
            self._lines.append(line)
            yield line

    def _keep_similarity(self, run: str, version: int) -> None:
        """Copy the comparison of a round, before the round's line: a killed simulation does both again."""
        text = self._store.settings.get(similarity_record.setting_of(run))
        if text and similarity_record.is_due(self._file, version):
            self._directory.keep_similarity(text)

    def _is_judged(self, run: str, version: int) -> bool:
        every = self._file.evaluate.every
        if every == 0 or version % every:
            return version + 1 in self._totals or every == 0
        if self._file.evaluate.on == "devices":  # they judge it in the next round
            return version + 1 in self._totals
        return bool(self._store.evaluations.all(run, version))

    def _line(self, run: str, version: int, *, last: bool) -> Json:
        rows = self._store.evaluations.all(run, version)
        result = evaluation.summarize(version, rows, len(self._file.classes))
        up, down = self._total(run) if last else self._totals.get(version) or self._total(run)
        now = time.monotonic()
        seconds, self._line_at = now - self._line_at, now
        updates = self._updates(run, version)
        return {
            "round": version,
            "accuracy": result.accuracy if result else None,
            "loss": result.loss if result else None,
            "macro_f1": result.macro_f1 if result else None,
            "balanced_accuracy": result.balanced_accuracy if result else None,
            "accuracy_per_architecture": evaluation.per_architecture(rows),
            "accuracy_per_device": _per_device(rows) if self._file.evaluate.on == "devices" else {},
            "bytes_up": up - sum(line["bytes_up"] for line in self._lines),
            "bytes_down": down - sum(line["bytes_down"] for line in self._lines),
            "seconds": round(seconds, 3),
            "devices": [self._device(update) for update in updates],
            "failures": self._failures(run, version),
        }

    def _updates(self, run: str, version: int) -> Sequence[UpdateRow]:
        return self._store.updates.of_attempt(run, version, self._attempt(run, version))

    def _attempt(self, run: str, version: int) -> int:
        last = self._store.rounds.last(run)
        if last is not None and last.number == version:
            return last.attempt
        return max((row.attempt for row in self._store.rounds.all(run) if row.number == version), default=1)

    def _device(self, update: UpdateRow) -> Json:
        report = update.report
        plan = report.plan
        return {
            "device": update.device,
            "plan": plan.describe() if plan is not None else "",
            "predicted": report.memory.predicted_bytes if plan is not None else None,
            "predicted_training": plan.training_bytes if plan is not None else None,
            "peak": report.memory.peak_bytes,
            "base": report.memory.base_bytes,
            "budget": self._budgets[update.device],
            "samples": report.num_samples,
            "replans": int(report.scalars.get("replans", 0.0)),
            "seconds": report.seconds,
            "loss": report.scalars.get("loss"),
        }

    def _failures(self, run: str, version: int) -> list[Json]:
        leases = self._store.leases.of_attempt(run, version, self._attempt(run, version))
        failed = (lease for lease in leases if lease.state in ("declined", "refused", "expired"))
        return [{"device": lease.device, "code": lease.code, "detail": lease.detail} for lease in failed]

    def summary(self, run: str) -> Json:
        """The result that the command prints, except for the model."""
        accuracies = [line["accuracy"] for line in self._lines]
        judged = [line for line in self._lines if line["accuracy"] is not None]
        last = judged[-1] if judged else None
        first = evaluation.summarize(0, self._store.evaluations.all(run, 0), len(self._file.classes))
        run_row = self._store.runs.get(run)
        return {
            "name": self._file.name,
            "method": self._file.method.name,
            "model": self._file.what,
            "seed": self._file.seed,
            "accuracy": last["accuracy"] if last else None,
            "accuracy_before": first.accuracy if first is not None else None,
            "accuracy_per_round": accuracies,
            "accuracy_per_architecture": last["accuracy_per_architecture"] if last else {},
            "best_accuracy": max((line["accuracy"] for line in judged), default=None),
            "bytes_up": sum(line["bytes_up"] for line in self._lines),
            "bytes_down": sum(line["bytes_down"] for line in self._lines),
            "rounds": len(self._lines),
            "devices": len(self._budgets),
            "seconds": round(sum(line["seconds"] for line in self._lines), 3),
            "reason": run_row.reason if run_row is not None else "",
            "environment": dict(run_row.environment) if run_row is not None else {},
            "peak_bytes": {
                "coordinator": meter.peak_rss_bytes(),
                "worker": max((device["peak"] for device in self._trained()), default=0),
                "training": max((device["peak"] - device["base"] for device in self._trained()), default=0),
            },
            "per_device": self._per_device(run),
            "left_out": [
                {"device": row.device or None, "round": row.round, "code": row.code, "detail": row.detail}
                for row in (evaluation.untested(self._store.evaluations.all(run)), *self._store.rounds.left_out(run))
                if row is not None
            ],
        }

    def _trained(self) -> Iterator[Json]:
        for line in self._lines:
            yield from line["devices"]

    def _per_device(self, run: str) -> list[Json]:
        """Each device over all rounds."""
        traffic = self._store.traffic.by_device(run)
        trained: dict[str, list[Json]] = {name: [] for name in self._budgets}
        for device in self._trained():
            trained[device["device"]].append(device)
        failed = {failure["device"]: failure["code"] for line in self._lines for failure in line["failures"]}
        return [
            {
                "device": name,
                "rounds": len(reports),
                "samples": reports[-1]["samples"] if reports else None,
                "plan": reports[-1]["plan"] if reports else "",
                "budget": self._budgets[name],
                "predicted_training": reports[-1]["predicted_training"] if reports else None,
                "training_peak": max((device["peak"] - device["base"] for device in reports), default=None),
                "bytes_up": traffic.get(name, (0, 0))[0],
                "bytes_down": traffic.get(name, (0, 0))[1],
                "failure": failed.get(name, ""),
            }
            for name, reports in trained.items()
        ]


def _per_device(rows: Sequence[EvaluationRow]) -> dict[str, float]:
    return {row.device: row.num_correct / row.num_samples for row in rows if row.num_samples}
