"""What the store knows of runs, for the page: read by the page's thread, through a connection that cannot write.

The queries add up inside of SQLite, which lets the coordinator's loop run meanwhile; a version of a model that no
device evaluates any more is read once. Numbers are those of `coordinator run show`.

Covers: the curve of a run, devices' newest figures, rounds, failures, runs in a line. Does not cover: what only the
loop knows (`picture`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from coordinator.dashboard.answers import CurvePoint, RunRowAnswer
from coordinator.rounds import evaluation
from coordinator.store.database import Database
from coordinator.store.rows import SERVER, LeaseRow, RoundRow, RunRow
from coordinator.store.sqlite import SqliteStore
from edge_client.config.run_file import RunFile
from edge_client.records import from_map

__all__ = ["DeviceFigures", "History", "RunHistory"]

# of private memory where the device measures that and its plan is made for it, otherwise RSS: as `Report.memory`
_BOTH = ("""json_extract(report, '$."x-private-peak"')""", """json_extract(report, '$.plan."x-private-budget"')""")
_MEMORY = ", ".join(
    f"""CASE WHEN {_BOTH[0]} > 0 AND {_BOTH[1]} > 0
        THEN json_extract(report, '{private}') ELSE json_extract(report, '{rss}') END AS {name}"""
    for name, private, rss in (
        ("peak", '$."x-private-peak"', "$.peak_bytes"),
        ("budget", '$.plan."x-private-budget"', "$.plan.budget_bytes"),
        ("predicted", '$.plan."x-private-predicted"', "$.plan.predicted_bytes"),
    )
)
_READ_AHEAD = 4  # versions whose macro-F1 is added up between two pictures


class DeviceFigures(NamedTuple):
    """A device's newest figures in a run; memory is of the round in which it came nearest to its budget."""

    peak_bytes: int = 0
    predicted_bytes: int = 0
    budget_bytes: int = 0
    accuracy: float | None = None
    num_samples: int = 0
    round: int = 0


@dataclass(slots=True)
class _Judged:
    """A version as the store has judged it so far."""

    count: int
    accuracy: float
    loss: float
    num_devices: int
    low: float | None = None
    high: float | None = None
    macro_f1: float | None = None
    recall: tuple[float | None, ...] = ()


@dataclass(slots=True)
class RunHistory:
    """What is remembered of one run between two pictures."""

    row: RunRow
    file: RunFile
    last_update: int = 0  # rowid
    last_evaluation: int = 0
    figures: dict[str, DeviceFigures] = field(default_factory=dict)
    judged: dict[int, _Judged] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    version: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    round_seconds: dict[int, float] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)  # devices with new figures

    def take_touched(self) -> set[str]:
        """The devices whose figures have changed since the last time."""
        touched, self.touched = self.touched, set()
        return touched

    @property
    def has_more(self) -> bool:
        """Whether something is still to be added up."""
        return any(judged.macro_f1 is None for judged in self.judged.values())


class History:
    """The store of a running coordinator, read only. Used by one thread."""

    def __init__(self, path: Path) -> None:
        self.store = SqliteStore(path, read_only=True)
        self._database = Database(path, read_only=True)
        self._runs: dict[str, RunHistory] = {}

    def close(self) -> None:
        """Close both connections."""
        self.store.close()
        self._database.close()

    # runs

    def newest_run(self) -> str:
        """The run that is open or was the last; empty if there is none."""
        query = "SELECT id FROM run WHERE dry = 0 ORDER BY state = 'running' DESC, rowid DESC LIMIT 1"
        rows = self._database.read(query)
        return str(rows[0]["id"]) if rows else ""

    def runs(self, before: int | None, limit: int) -> tuple[tuple[RunRowAnswer, ...], int | None]:
        """Runs in a line, newest first, and the number behind which the next page begins."""
        query = """SELECT r.rowid AS number, r.*,
                     (SELECT max(version) FROM model m WHERE m.run = r.id) AS version,
                     (SELECT score FROM model m WHERE m.run = r.id AND m.version = r.best_version) AS best_score
                   FROM run r WHERE dry = 0 AND r.rowid < ? ORDER BY r.rowid DESC LIMIT ?"""
        rows = self._database.read(query, before if before is not None else 1 << 60, limit + 1)
        answers = []
        for row in rows[:limit]:
            file = from_map(RunFile, json.loads(row["file"]))
            answers.append(
                RunRowAnswer(
                    run=row["id"],
                    state=row["state"],
                    reason=row["reason"],
                    round=row["version"] or 0,
                    rounds=file.stop.rounds,
                    method=file.method.name,
                    model=file.what,
                    metric=file.stop.metric,
                    best_version=row["best_version"],
                    best_score=row["best_score"],
                    created_s=row["created_s"],
                )
            )
        return tuple(answers), rows[limit - 1]["number"] if len(rows) > limit else None

    def run(self, run_id: str) -> RunHistory | None:
        """A run with everything that has come since it was last asked for; None if there is no such run."""
        row = self.store.runs.get(run_id)
        if row is None:
            self._runs.pop(run_id, None)
            return None
        history = self._runs.get(run_id)
        if history is None:
            if len(self._runs) > 8:
                self._runs.pop(next(iter(self._runs)))
            history = self._runs[run_id] = RunHistory(row=row, file=from_map(RunFile, row.file))
        history.row = row
        self._read_updates(history)
        self._read_evaluations(history)
        self._read_models(history)
        return history

    def _read_updates(self, history: RunHistory) -> None:
        query = f"""SELECT rowid AS number, device, round, {_MEMORY}, json_extract(report, '$.num_samples') AS samples
                   FROM update_ WHERE run = ? AND rowid > ? ORDER BY rowid"""
        for row in self._database.read(query, history.row.id, history.last_update):
            history.last_update = row["number"]
            before = history.figures.get(row["device"], DeviceFigures())
            peak, budget, predicted = row["peak"] or 0, row["budget"] or 0, row["predicted"] or 0
            share = peak / budget if budget else 0.0
            share_before = before.peak_bytes / before.budget_bytes if before.budget_bytes else 0.0
            if (share, peak) >= (share_before, before.peak_bytes):
                before = before._replace(peak_bytes=peak, budget_bytes=budget, predicted_bytes=predicted)
            history.touched.add(row["device"])
            history.figures[row["device"]] = before._replace(num_samples=row["samples"] or 0, round=row["round"])

    def _read_evaluations(self, history: RunHistory) -> None:
        run_id = history.row.id
        query = "SELECT rowid AS number, version FROM evaluation WHERE run = ? AND rowid > ? ORDER BY rowid"
        news = self._database.read(query, run_id, history.last_evaluation)
        if news:
            history.last_evaluation = news[-1]["number"]
        for version in sorted({row["version"] for row in news}):
            self._judge(history, version)
        todo = [version for version, judged in history.judged.items() if judged.macro_f1 is None]
        for version in sorted(todo, reverse=True)[:_READ_AHEAD]:
            self._add_up_classes(history, version)

    def _judge(self, history: RunHistory, version: int) -> None:
        query = """SELECT device, sum(num_samples) AS samples, sum(num_correct) AS correct, sum(loss_sum) AS loss
                   FROM evaluation WHERE run = ? AND version = ? GROUP BY device"""
        rows = self._database.read(query, history.row.id, version)
        total = sum(row["samples"] for row in rows)
        if total == 0:
            return
        shares = sorted(row["correct"] / row["samples"] for row in rows if row["samples"] and row["device"] != SERVER)
        history.judged[version] = _Judged(
            count=len(rows),
            accuracy=sum(row["correct"] for row in rows) / total,
            loss=sum(row["loss"] for row in rows) / total,
            num_devices=len(shares),
            low=_quantile(shares, 0.1),
            high=_quantile(shares, 0.9),
        )
        for row in rows:
            if row["samples"] and row["device"] != SERVER:
                before = history.figures.get(row["device"], DeviceFigures())
                history.touched.add(row["device"])
                history.figures[row["device"]] = before._replace(accuracy=row["correct"] / row["samples"])

    def _add_up_classes(self, history: RunHistory, version: int) -> None:
        """The sums of all confusion counts, added up inside of SQLite."""
        query = """SELECT j.key AS place, sum(j.value) AS count FROM evaluation e, json_each(e.confusion) j
                   WHERE e.run = ? AND e.version = ? GROUP BY j.key ORDER BY j.key"""
        counts = [int(row["count"]) for row in self._database.read(query, history.row.id, version)]
        judged = history.judged[version]
        judged.macro_f1, judged.recall = evaluation.scores_of_classes(counts, len(history.file.classes))

    def _read_models(self, history: RunHistory) -> None:
        run_id = history.row.id
        query = "SELECT version, score FROM model WHERE run = ? AND version >= ? ORDER BY version"
        for row in self._database.read(query, run_id, max(0, history.version - 2)):
            history.version = row["version"]
            if row["score"] is not None:
                history.scores[row["version"]] = row["score"]
        query = """SELECT number, elapsed_s, json_extract(moments, '$.announce') AS seconds FROM round
                   WHERE run = ? AND state = 'ANNOUNCED' AND goal > 0 AND number >= ? ORDER BY number"""
        newest = max(history.round_seconds, default=0)
        for row in self._database.read(query, run_id, newest):
            if row["seconds"] is not None:
                history.round_seconds[row["number"]] = row["seconds"]
        ((up, down),) = self._database.read(
            "SELECT coalesce(sum(up), 0), coalesce(sum(down), 0) FROM traffic WHERE run = ?", run_id
        )
        history.bytes_up, history.bytes_down = up, down

    def curve(self, history: RunHistory) -> tuple[CurvePoint, ...]:
        """The run's results by version."""
        return tuple(
            CurvePoint(
                version=version,
                accuracy=judged.accuracy,
                macro_f1=judged.macro_f1,
                loss=judged.loss,
                p10=judged.low,
                p90=judged.high,
                num_devices=judged.num_devices,
                score=history.scores.get(version),
                seconds=history.round_seconds.get(version),
            )
            for version, judged in sorted(history.judged.items())
        )

    # rounds and devices

    def rounds(self, run_id: str, limit: int) -> list[RoundRow]:
        """The newest attempts of rounds, oldest first."""
        query = "SELECT * FROM round WHERE run = ? ORDER BY number DESC, attempt DESC LIMIT ?"
        return self._database.all(RoundRow, query, run_id, limit)[::-1]

    def leases(self, run_id: str, number: int, attempt: int, after: int, limit: int) -> list[LeaseRow]:
        """The leases of an attempt, in the order of issue."""
        query = "SELECT * FROM lease WHERE run = ? AND round = ? AND attempt = ? AND issue > ? ORDER BY issue LIMIT ?"
        return self._database.all(LeaseRow, query, run_id, number, attempt, after, limit)

    def failure_details(self, run_id: str) -> dict[str, LeaseRow]:
        """Each device's newest failure in a run, of the newest hundred."""
        return {lease.device: lease for lease in reversed(self.store.leases.run_failures(run_id, 100))}

    def device_rounds(self, run_id: str, device: str, limit: int) -> list[tuple[int, int, int, int, float]]:
        """A device's newest rounds: number, predicted, peak and budget in bytes, seconds; newest first."""
        query = f"""SELECT round, {_MEMORY}, json_extract(report, '$.seconds') AS seconds
                   FROM update_ WHERE run = ? AND device = ? ORDER BY round DESC LIMIT ?"""
        rows = self._database.read(query, run_id, device, limit)
        return [
            (row["round"], row["predicted"] or 0, row["peak"] or 0, row["budget"] or 0, row["seconds"] or 0.0)
            for row in rows
        ]

    def shared_logs(self, before: int, limit: int) -> list[LeaseRow]:
        """Failed leases whose devices sent the last lines of their log, newest first."""
        query = """SELECT * FROM lease WHERE state IN ('declined', 'refused', 'expired') AND log != '[]' AND issue < ?
                   ORDER BY issue DESC LIMIT ?"""
        return self._database.all(LeaseRow, query, before, limit)


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value at this share of the way through sorted values, interpolated."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
