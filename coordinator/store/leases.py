"""The leases: which device was assigned what in a round, and how that ended (table `lease`)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from coordinator.store.base import Leases
from coordinator.store.database import Database
from coordinator.store.rows import LeaseRow

__all__ = ["LeaseTable"]

_FAILED = "state IN ('declined', 'refused', 'expired')"


class LeaseTable(Leases):
    """`Leases` in the table `lease`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, leases: Sequence[LeaseRow]) -> None:
        with self._database.transaction("leases") as transaction:
            for lease in leases:
                transaction.insert("lease", lease)

    def next_issue(self) -> int:
        ((highest,),) = self._database.read("SELECT coalesce(max(issue), 0) FROM lease")
        return int(highest) + 1

    def get(self, lease_id: str) -> LeaseRow | None:
        return self._database.first(LeaseRow, "SELECT * FROM lease WHERE id = ?", lease_id)

    def of_attempt(self, run_id: str, number: int, attempt: int) -> list[LeaseRow]:
        query = "SELECT * FROM lease WHERE run = ? AND round = ? AND attempt = ? ORDER BY issue"
        return self._database.all(LeaseRow, query, run_id, number, attempt)

    def set_state(
        self, lease_id: str, state: str, *, code: str = "", detail: str = "", log: Sequence[str] = ()
    ) -> None:
        with self._database.transaction("lease") as transaction:
            transaction.execute(
                "UPDATE lease SET state = ?, code = ?, detail = ?, log = ? WHERE id = ?",
                *(state, code, detail, json.dumps(list(log)), lease_id),
            )

    def device_failures(self, device: str, limit: int) -> list[LeaseRow]:
        query = f"SELECT * FROM lease WHERE device = ? AND {_FAILED} ORDER BY issue DESC LIMIT ?"
        return self._database.all(LeaseRow, query, device, limit)

    def run_failures(self, run_id: str, limit: int) -> list[LeaseRow]:
        query = f"SELECT * FROM lease WHERE run = ? AND {_FAILED} ORDER BY issue DESC LIMIT ?"
        return self._database.all(LeaseRow, query, run_id, limit)

    def drop_rate(self, run_id: str, leases: int) -> float:
        # the + keeps SQLite off the index of rounds: the newest leases are at the end of the table
        query = """SELECT avg(state != 'stored') FROM (SELECT state FROM lease WHERE +run = ? AND train = 1
                   AND state NOT IN ('offered', 'accepted', 'cancelled') ORDER BY issue DESC LIMIT ?)"""
        ((rate,),) = self._database.read(query, run_id, leases)
        return float(rate or 0.0)

    def trained_slices(self, run_id: str) -> dict[str, str]:
        query = "SELECT device, slice FROM lease WHERE run = ? AND train = 1 AND state = 'stored' ORDER BY issue"
        return {row["device"]: row["slice"] for row in self._database.read(query, run_id)}
