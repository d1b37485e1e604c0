"""The updates that devices sent, and what later rounds take from them: plans and norms (tables `update_`,
`small_blob`).
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.store.base import Updates
from coordinator.store.database import Database, Transaction
from coordinator.store.evaluations import put_evaluation
from coordinator.store.row_codec import to_column
from coordinator.store.rows import EvaluationRow, UpdateRow
from coordinator.store.traffic import count_traffic

__all__ = ["UpdateTable", "forget_bodies"]

_NEWEST_ROUNDS = 50  # how far back a device's newest update is looked for


def forget_bodies(transaction: Transaction, run_id: str, number: int, attempt: int) -> None:
    """An attempt is over: nobody needs the bytes of its updates any more."""
    transaction.execute(
        """DELETE FROM small_blob
           WHERE lease IN (SELECT lease FROM update_ WHERE run = ? AND round = ? AND attempt = ?)""",
        *(run_id, number, attempt),
    )


class UpdateTable(Updates):
    """`Updates` in the tables `update_` (`update` is a word of SQL) and `small_blob`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(
        self,
        update: UpdateRow | None,
        evaluation: EvaluationRow | None,
        lease_id: str,
        traffic: Mapping[str, tuple[int, int]] = {},
        *,
        moments: Mapping[str, float] = {},
        phases: Mapping[str, float] = {},
        body: bytes | None = None,
    ) -> None:
        with self._database.transaction("update") as transaction:
            if update is not None:
                transaction.insert("update_", update)
                if body is not None:
                    transaction.execute("INSERT INTO small_blob VALUES (?, ?)", update.lease, body)
            if evaluation is not None:
                put_evaluation(transaction, evaluation)
            transaction.execute(
                "UPDATE lease SET state = 'stored', code = '', detail = '', moments = ?, phases = ? WHERE id = ?",
                *(to_column(moments), to_column(phases), lease_id),
            )
            for (run_id,) in self._database.read("SELECT run FROM lease WHERE id = ?", lease_id):
                count_traffic(transaction, run_id, traffic)

    def body(self, lease_id: str) -> bytes | None:
        rows = self._database.read("SELECT body FROM small_blob WHERE lease = ?", lease_id)
        return bytes(rows[0]["body"]) if rows else None

    def drop(self, update: UpdateRow) -> None:
        with self._database.transaction("update") as transaction:
            transaction.execute("DELETE FROM small_blob WHERE lease = ?", update.lease)
            transaction.execute("DELETE FROM update_ WHERE lease = ?", update.lease)
            transaction.execute("UPDATE lease SET state = 'offered', code = '', detail = '' WHERE id = ?", update.lease)
            transaction.execute(
                """UPDATE round SET state = 'RUNNING', set_hash = ''
                   WHERE run = ? AND number = ? AND attempt = ? AND state = 'FROZEN'""",
                *(update.run, update.round, update.attempt),
            )

    def of_attempt(self, run_id: str, number: int, attempt: int) -> list[UpdateRow]:
        query = "SELECT * FROM update_ WHERE run = ? AND round = ? AND attempt = ? ORDER BY device"
        return self._database.all(UpdateRow, query, run_id, number, attempt)

    def of_lease(self, lease_id: str) -> UpdateRow | None:
        return self._database.first(UpdateRow, "SELECT * FROM update_ WHERE lease = ?", lease_id)

    def recent(self, run_id: str, limit: int) -> list[UpdateRow]:
        query = "SELECT * FROM update_ WHERE run = ? ORDER BY round DESC, attempt DESC, device LIMIT ?"
        return self._database.all(UpdateRow, query, run_id, limit)[::-1]

    def counts(self, run_id: str) -> dict[int, int]:
        query = """SELECT r.number, count(*) AS count FROM round r CROSS JOIN update_ u
                   ON r.run = u.run AND r.number = u.round AND r.attempt = u.attempt
                   WHERE r.run = ? AND r.state IN ('COMMITTED', 'ANNOUNCED') GROUP BY r.number ORDER BY r.number"""
        return {row["number"]: row["count"] for row in self._database.read(query, run_id)}

    def last_counted_lease(self, run_id: str, device: str) -> str | None:
        query = """SELECT u.lease FROM update_ u JOIN round r
                   ON r.run = u.run AND r.number = u.round AND r.attempt = u.attempt
                   WHERE u.run = ? AND u.device = ? AND r.state IN ('COMMITTED', 'ANNOUNCED')
                   ORDER BY u.round DESC LIMIT 1"""
        rows = self._database.read(query, run_id, device)
        return rows[0]["lease"] if rows else None

    def newest(self, run_id: str) -> dict[str, UpdateRow]:
        ((last_version,),) = self._database.read("SELECT coalesce(max(version), 0) FROM model WHERE run = ?", run_id)
        # of the bare columns of a group, SQLite takes those of the row with the maximum
        query = "SELECT *, max(1000000 * round + attempt) FROM update_ WHERE run = ? AND round >= ? GROUP BY device"
        rows = self._database.all(UpdateRow, query, run_id, max(0, last_version - _NEWEST_ROUNDS))
        return {row.device: row for row in rows}

    def recent_norms(self, run_id: str, rounds: int) -> dict[str, list[float]]:
        query = """SELECT l.slice, u.norm FROM update_ u
                   JOIN round r ON r.run = u.run AND r.number = u.round AND r.attempt = u.attempt
                   JOIN lease l ON l.id = u.lease
                   WHERE u.run = ?1 AND r.state IN ('COMMITTED', 'ANNOUNCED')
                   AND u.round > (SELECT coalesce(max(version), 0) FROM model WHERE run = ?1) - ?2
                   ORDER BY u.round, u.device"""
        norms: dict[str, list[float]] = {}
        for slice_name, norm in self._database.read(query, run_id, rounds):
            norms.setdefault(slice_name, []).append(norm)
        return norms
