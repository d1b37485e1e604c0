"""The bytes that were published for each run and device (table `traffic`)."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.store.base import Traffic
from coordinator.store.database import Database, Transaction

__all__ = ["TrafficTable", "count_traffic"]


class TrafficTable(Traffic):
    """`Traffic` in the table `traffic`. What travelled for an update is counted by `Updates.save`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, run_id: str, moved: Mapping[str, tuple[int, int]]) -> None:
        with self._database.transaction("traffic") as transaction:
            count_traffic(transaction, run_id, moved)

    def by_device(self, run_id: str) -> dict[str, tuple[int, int]]:
        rows = self._database.read("SELECT device, up, down FROM traffic WHERE run = ? ORDER BY device", run_id)
        return {row["device"]: (row["up"], row["down"]) for row in rows}


def count_traffic(transaction: Transaction, run_id: str, moved: Mapping[str, tuple[int, int]]) -> None:
    """Add to the totals of a run: device -> (bytes up, bytes down)."""
    transaction.execute_many(
        """INSERT INTO traffic VALUES (?1, ?2, ?3, ?4)
           ON CONFLICT (run, device) DO UPDATE SET up = up + ?3, down = down + ?4""",
        [(run_id, device, up, down) for device, (up, down) in moved.items()],
    )
