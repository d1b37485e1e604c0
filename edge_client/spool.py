"""What a device must not forget, in `STATE/state.db`: its lease, its finished update, the newest assignment seen.

Three commits per round, to spare SD cards.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
from pathlib import Path

from edge_client import durable
from edge_client.errors import PayloadError
from edge_client.records import from_map, to_map
from edge_client.session import Finished
from edge_client.wire import frames
from edge_client.wire.messages import Assign

__all__ = ["Spool"]

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS lease (
    id INTEGER PRIMARY KEY CHECK (id = 1), assign BLOB NOT NULL, finished TEXT
);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class Spool:
    """The device's database; one thread."""

    def __init__(self, path: Path) -> None:
        with durable.disk_errors(f"cannot open {path}"):
            try:
                self._db = _open(path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                _move_aside(path, error)
                self._db = _open(path)

    def load(self) -> tuple[Assign | None, Finished | None, tuple[int, int]]:
        """The lease in hand, its finished update, and the highest (epoch, issue) seen."""
        row = self._db.execute("SELECT assign, finished FROM lease").fetchone()
        meta = self._db.execute("SELECT value FROM meta WHERE key = 'highest'").fetchone()
        epoch, issue = json.loads(meta[0]) if meta else (0, 0)
        if row is None:
            return None, None, (epoch, issue)
        try:
            assign = from_map(Assign, frames.unpack(row[0]))
        except PayloadError:
            return None, None, (epoch, issue)  # written by another version: the coordinator will assign again
        finished = Finished(**json.loads(row[1])) if row[1] else None
        return assign, finished, (epoch, issue)

    def save(self, assign: Assign, finished: Finished | None) -> None:
        """Keep the lease; durable when this returns."""
        point = "daemon.assign" if finished is None else "daemon.update"
        with durable.disk_errors("cannot save the assignment"), self._rollback():
            self._db.execute(
                "INSERT OR REPLACE INTO lease VALUES (1, ?, ?)",
                (frames.pack(to_map(assign)), json.dumps(to_map(finished)) if finished else None),
            )
            highest = json.dumps([assign.epoch, assign.issue])
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('highest', ?)", (highest,))
            durable.commit(self._db, point=point)

    def forget(self) -> None:
        """The lease is over."""
        with durable.disk_errors("cannot forget the assignment"), self._rollback():
            self._db.execute("DELETE FROM lease")
            durable.commit(self._db, point="daemon.forget")

    def _rollback(self) -> _Rollback:
        return _Rollback(self._db)

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _open(path: Path) -> sqlite3.Connection:
    db = durable.open_database(path)
    (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        db.close()
        raise sqlite3.DatabaseError(state)
    db.executescript(_SCHEMA)
    return db


def _move_aside(path: Path, error: sqlite3.DatabaseError) -> None:
    """A device must come back after any power cut: it loses its lease, which the coordinator offers again."""
    log.error("%s is damaged (%s); kept as %s.damaged, this device begins anew", path, error, path.name)
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{path}.damaged{suffix}")


class _Rollback:
    """Leaves no transaction open behind an error."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and self._db.in_transaction:
            self._db.rollback()
