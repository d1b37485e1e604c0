"""Which blobs the rows still refer to; the others may be removed from the disk."""

from __future__ import annotations

from coordinator.store.base import BlobReferences
from coordinator.store.database import Database

__all__ = ["BlobReferenceQueries"]

# CROSS: SQLite is to begin with the few runs and the few open rounds, not with all their models and updates
_KEPT_MODELS = """FROM (
    SELECT m.sha256, m.sent_sha256 FROM run CROSS JOIN model m ON m.run = run.id
    AND m.version > (SELECT max(n.version) FROM model n WHERE n.run = run.id) - ?1
    UNION ALL
    SELECT m.sha256, m.sent_sha256 FROM run CROSS JOIN model m ON m.run = run.id AND m.version = run.best_version)"""
_OPEN_UPDATES = """FROM round r CROSS JOIN update_ u ON r.run = u.run AND r.number = u.round AND r.attempt = u.attempt
                   WHERE r.state IN ('RUNNING', 'FROZEN')"""
_OPEN_PARTS = "FROM part p JOIN run ON run.id = p.run WHERE run.state = 'running'"
_WANTED_DEPLOYMENTS = "FROM deployment WHERE state IN ('pending', 'active')"


class BlobReferenceQueries(BlobReferences):
    """`BlobReferences` as queries over the tables whose rows name a blob; nothing is written."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def needed(self, keep_models: int) -> set[str]:
        read = self._database.read
        needed: set[str] = set()
        for row in read("SELECT settings_sha256, task_sha256 FROM run"):
            needed.update(sha256 for sha256 in row if sha256)
        for row in read(f"SELECT sha256, sent_sha256 {_KEPT_MODELS}", keep_models):
            needed.update(row)
        needed.update(row["sha256"] for row in read(f"SELECT u.sha256 {_OPEN_UPDATES}"))
        needed.update(row["sha256"] for row in read(f"SELECT p.sha256 {_OPEN_PARTS}"))
        needed.update(row["sha256"] for row in read(f"SELECT sha256 {_WANTED_DEPLOYMENTS}"))
        return needed

    def is_needed(self, sha256: str, keep_models: int) -> bool:
        queries = (
            (f"SELECT 1 {_KEPT_MODELS} WHERE ?2 IN (sha256, sent_sha256)", (keep_models, sha256)),
            (f"SELECT 1 {_OPEN_UPDATES} AND u.sha256 = ?", (sha256,)),
            (f"SELECT 1 {_OPEN_PARTS} AND p.sha256 = ?", (sha256,)),
            (f"SELECT 1 {_WANTED_DEPLOYMENTS} AND sha256 = ?", (sha256,)),
            ("SELECT 1 FROM run WHERE ?1 IN (settings_sha256, task_sha256)", (sha256,)),
        )
        return any(self._database.read(query, *arguments) for query, arguments in queries)
