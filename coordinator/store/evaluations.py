"""How well each version did on the data of the devices and of the server (table `evaluation`)."""

from __future__ import annotations

from coordinator.store.base import Evaluations
from coordinator.store.database import Database, Transaction
from coordinator.store.rows import EvaluationRow

__all__ = ["EvaluationTable", "put_evaluation"]


class EvaluationTable(Evaluations):
    """`Evaluations` in the table `evaluation`. A device's evaluation is saved by `Updates.save`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save(self, evaluation: EvaluationRow) -> None:
        with self._database.transaction("evaluation") as transaction:
            put_evaluation(transaction, evaluation)

    def all(self, run_id: str, version: int | None = None) -> list[EvaluationRow]:
        if version is None:
            query = "SELECT * FROM evaluation WHERE run = ? ORDER BY version, device, slice"
            return self._database.all(EvaluationRow, query, run_id)
        query = "SELECT * FROM evaluation WHERE run = ? AND version = ? ORDER BY device, slice"
        return self._database.all(EvaluationRow, query, run_id, version)

    def versions(self, run_id: str) -> list[int]:
        query = "SELECT DISTINCT version FROM evaluation WHERE run = ? ORDER BY version"
        return [row["version"] for row in self._database.read(query, run_id)]


def put_evaluation(transaction: Transaction, evaluation: EvaluationRow) -> None:
    """Add an evaluation in place of the one with the same run, version, device and slice, if there is one."""
    key = (evaluation.run, evaluation.version, evaluation.device, evaluation.slice)
    transaction.execute(
        "DELETE FROM evaluation WHERE run = ? AND version = ? AND device = ? AND slice = ?",
        *key,
    )
    transaction.insert("evaluation", evaluation)
