"""The versions of each run's model, their scores, and the parts in which the newest one travels
(tables `model` and `part`).
"""

from __future__ import annotations

from coordinator.store.base import Models
from coordinator.store.database import Database
from coordinator.store.rows import ModelRow, PartRow

__all__ = ["ModelTable"]


class ModelTable(Models):
    """`Models` in the tables `model` and `part`. A new version is added by `Runs.start` and `Rounds.commit`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def last(self, run_id: str) -> ModelRow | None:
        return self._database.first(ModelRow, "SELECT * FROM model WHERE run = ? ORDER BY version DESC LIMIT 1", run_id)

    def get(self, run_id: str, version: int) -> ModelRow | None:
        return self._database.first(ModelRow, "SELECT * FROM model WHERE run = ? AND version = ?", run_id, version)

    def all(self, run_id: str) -> list[ModelRow]:
        return self._database.all(ModelRow, "SELECT * FROM model WHERE run = ? ORDER BY version", run_id)

    def scored_after(self, run_id: str, version: int, limit: int) -> list[ModelRow]:
        query = "SELECT * FROM model WHERE run = ? AND version > ? AND score IS NOT NULL ORDER BY version LIMIT ?"
        return self._database.all(ModelRow, query, run_id, version, limit)

    def save_score(self, run_id: str, version: int, score: float, best_version: int) -> None:
        with self._database.transaction("score") as transaction:
            transaction.execute("UPDATE model SET score = ? WHERE run = ? AND version = ?", score, run_id, version)
            transaction.execute("UPDATE run SET best_version = ? WHERE id = ?", best_version, run_id)

    def scores(self, run_id: str) -> dict[int, float]:
        query = "SELECT version, score FROM model WHERE run = ? AND score IS NOT NULL ORDER BY version"
        return {row["version"]: row["score"] for row in self._database.read(query, run_id)}

    def add_part(self, part: PartRow) -> list[PartRow]:
        with self._database.transaction("part") as transaction:
            query = "SELECT * FROM part WHERE run = ? AND version < ? ORDER BY slice"
            outdated = self._database.all(PartRow, query, part.run, part.version)
            transaction.execute("DELETE FROM part WHERE run = ? AND version < ?", part.run, part.version)
            transaction.execute("DELETE FROM part WHERE run = ? AND slice = ?", part.run, part.slice)
            transaction.insert("part", part)
        return outdated

    def parts(self, run_id: str) -> list[PartRow]:
        return self._database.all(PartRow, "SELECT * FROM part WHERE run = ? ORDER BY slice", run_id)
