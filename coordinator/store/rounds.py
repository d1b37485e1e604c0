"""The attempts of rounds, from their opening to the announcement of their model (tables `round` and `left_out`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.store.base import Rounds
from coordinator.store.database import Database
from coordinator.store.row_codec import to_column
from coordinator.store.rows import LeaseRow, LeftOutRow, ModelRow, RoundRow
from coordinator.store.updates import forget_bodies

__all__ = ["RoundTable"]


class RoundTable(Rounds):
    """`Rounds` in the tables `round` and `left_out`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def open(self, round_: RoundRow, leases: Sequence[LeaseRow]) -> None:
        with self._database.transaction("open") as transaction:
            transaction.insert("round", round_)
            for lease in leases:
                transaction.insert("lease", lease)

    def last(self, run_id: str) -> RoundRow | None:
        query = "SELECT * FROM round WHERE run = ? ORDER BY number DESC, attempt DESC LIMIT 1"
        return self._database.first(RoundRow, query, run_id)

    def all(self, run_id: str) -> list[RoundRow]:
        return self._database.all(RoundRow, "SELECT * FROM round WHERE run = ? ORDER BY number, attempt", run_id)

    def save_deadline(
        self, run_id: str, number: int, attempt: int, *, remaining_s: float, extended: bool, elapsed_s: float
    ) -> None:
        with self._database.transaction("deadline") as transaction:
            transaction.execute(
                """UPDATE round SET remaining_s = ?, extended = ?, elapsed_s = ?
                   WHERE run = ? AND number = ? AND attempt = ?""",
                *(remaining_s, int(extended), elapsed_s, run_id, number, attempt),
            )

    def freeze(self, run_id: str, number: int, attempt: int, set_hash: str) -> None:
        with self._database.transaction("freeze") as transaction:
            transaction.execute(
                "UPDATE round SET state = 'FROZEN', set_hash = ? WHERE run = ? AND number = ? AND attempt = ?",
                *(set_hash, run_id, number, attempt),
            )

    def commit(self, number: int, attempt: int, model: ModelRow, left_out: Sequence[LeftOutRow] = ()) -> None:
        with self._database.transaction("round") as transaction:
            if model.version == 0:  # the first model, now with the mean and the scale of the devices' inputs
                transaction.execute("DELETE FROM model WHERE run = ? AND version = 0", model.run)
            transaction.insert("model", model)
            for row in left_out:
                key = (row.run, row.device, row.code)
                transaction.execute("DELETE FROM left_out WHERE run = ? AND device = ? AND code = ?", *key)
                transaction.insert("left_out", row)
            transaction.execute(
                "UPDATE round SET state = 'COMMITTED' WHERE run = ? AND number = ? AND attempt = ?",
                *(model.run, number, attempt),
            )

    def announce(self, run_id: str, number: int, attempt: int, moments: Mapping[str, float] = {}) -> None:
        with self._database.transaction("announce") as transaction:
            forget_bodies(transaction, run_id, number, attempt)
            transaction.execute(
                """UPDATE round SET state = 'ANNOUNCED', moments = ?4,
                       bytes_up = (SELECT coalesce(sum(up), 0) FROM traffic WHERE run = ?1),
                       bytes_down = (SELECT coalesce(sum(down), 0) FROM traffic WHERE run = ?1)
                   WHERE run = ?1 AND number = ?2 AND attempt = ?3""",
                *(run_id, number, attempt, to_column(moments)),
            )
            if number == 0:  # the sums of single devices are in the model now, and nobody needs them any more
                transaction.execute("DELETE FROM update_ WHERE run = ? AND round = 0", run_id)

    def abandon(self, run_id: str, number: int, attempt: int, reason: str) -> None:
        with self._database.transaction("abandon") as transaction:
            forget_bodies(transaction, run_id, number, attempt)
            transaction.execute(
                "UPDATE round SET state = 'ABANDONED', reason = ? WHERE run = ? AND number = ? AND attempt = ?",
                *(reason, run_id, number, attempt),
            )

    def left_out(self, run_id: str) -> list[LeftOutRow]:
        query = "SELECT * FROM left_out WHERE run = ? ORDER BY device, code"
        return self._database.all(LeftOutRow, query, run_id)
