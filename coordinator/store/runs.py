"""The runs: the queue, how each run stands, and the devices that took part (tables `run` and `run_device`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coordinator.store.base import Runs
from coordinator.store.database import Database
from coordinator.store.row_codec import to_column
from coordinator.store.rows import ModelRow, RunRow

__all__ = ["RunTable"]

# children before their parents
_TABLES_OF_A_RUN = (
    "update_",
    "evaluation",
    "traffic",
    "run_device",
    "lease",
    "round",
    "part",
    "left_out",
    "deployment",
    "model",
)
_FORGET_BODIES = "DELETE FROM small_blob WHERE lease IN (SELECT lease FROM update_ WHERE run = ?)"


class RunTable(Runs):
    """`Runs` in the tables `run` and `run_device`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, run: RunRow) -> None:
        with self._database.transaction("run") as transaction:
            transaction.insert("run", run)

    def remove(self, run_id: str) -> None:
        with self._database.transaction("run") as transaction:
            transaction.execute(_FORGET_BODIES, run_id)
            for table in _TABLES_OF_A_RUN:
                transaction.execute(f"DELETE FROM {table} WHERE run = ?", run_id)
            transaction.execute("DELETE FROM run WHERE id = ?", run_id)

    def next_number(self, name: str) -> int:
        run_ids = [row["id"] for row in self._database.read("SELECT id FROM run WHERE id GLOB ? || '-*'", name)]
        suffixes = [run_id[len(name) + 1 :] for run_id in run_ids]
        return max((int(suffix) for suffix in suffixes if suffix.isdigit()), default=0) + 1

    def all(self) -> list[RunRow]:
        return self._database.all(RunRow, "SELECT * FROM run ORDER BY rowid")

    def counts(self) -> dict[str, int]:
        rows = self._database.read("SELECT state, count(*) AS num FROM run WHERE dry = 0 GROUP BY state")
        return {row["state"]: row["num"] for row in rows}

    def get(self, run_id: str) -> RunRow | None:
        return self._database.first(RunRow, "SELECT * FROM run WHERE id = ?", run_id)

    def oldest(self, state: str) -> RunRow | None:
        return self._database.first(RunRow, "SELECT * FROM run WHERE state = ? ORDER BY rowid LIMIT 1", state)

    def start(self, model: ModelRow, settings_sha256: str, settings_length: int) -> None:
        with self._database.transaction("initial") as transaction:
            transaction.insert("model", model)
            transaction.execute(
                "UPDATE run SET settings_sha256 = ?, settings_length = ?, state = 'running' WHERE id = ?",
                settings_sha256,
                settings_length,
                model.run,
            )

    def set_state(self, run_id: str, state: str, reason: str = "") -> None:
        with self._database.transaction("run-state") as transaction:
            transaction.execute("UPDATE run SET state = ?, reason = ? WHERE id = ?", state, reason, run_id)

    def fail(self, run_id: str, reason: str) -> None:
        with self._database.transaction("run-state") as transaction:
            transaction.execute("UPDATE run SET state = 'failed', reason = ? WHERE id = ?", reason, run_id)
            transaction.execute(_FORGET_BODIES, run_id)
            transaction.execute(
                "UPDATE round SET state = 'ABANDONED', reason = ? WHERE run = ? AND state IN ('RUNNING', 'FROZEN')",
                reason,
                run_id,
            )
            transaction.execute(
                """UPDATE lease SET state = 'cancelled', code = 'abandoned', detail = 'the run failed'
                   WHERE run = ? AND state IN ('offered', 'accepted')""",
                run_id,
            )

    def save_device_info(self, run_id: str, device: str, info: Mapping[str, Any]) -> None:
        with self._database.transaction("run-device") as transaction:
            transaction.execute("INSERT OR IGNORE INTO run_device VALUES (?, ?, ?)", run_id, device, to_column(info))

    def device_info(self, run_id: str) -> dict[str, dict[str, Any]]:
        rows = self._database.read("SELECT device, info FROM run_device WHERE run = ? ORDER BY device", run_id)
        return {row["device"]: json.loads(row["info"]) for row in rows}
