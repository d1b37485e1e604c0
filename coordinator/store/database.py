"""The database below the store: one SQLite file (WAL) or memory, used by one thread.

Covers: opening and migrating the file, transactions, reading rows, and the errors of a full or broken disk.
Does not cover: any table; each group of tables has its class (`runs`, `rounds`, ...).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from coordinator.store.row_codec import from_columns, to_columns
from coordinator.store.schema import LAYOUT, MIGRATIONS, SCHEMA
from coordinator.store.turn import GroupCommit
from edge_client import durable
from edge_client.errors import DiskFullError, MachineError

__all__ = ["Database", "Transaction", "read_meta"]

R = TypeVar("R")

_CACHE_KIB = 16_384  # at most: pages of a long run are found here, not read again for every round


class Transaction:
    """The statements that change something. They take effect together when the transaction ends, or not at all."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, *arguments: object) -> int:
        """Run one statement; returns how many rows it changed."""
        return self._connection.execute(statement, arguments).rowcount

    def execute_many(self, statement: str, arguments: Iterable[Sequence[object]]) -> None:
        """Run one statement once for each of these arguments."""
        self._connection.executemany(statement, arguments)

    def insert(self, table: str, row: object) -> None:
        """Add a row; `sqlite3.IntegrityError` if that breaks a constraint."""
        columns = to_columns(row)
        placeholders = ", ".join(f":{name}" for name in columns)
        self._connection.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({placeholders})", columns)


class Database:
    """A connection to the database, with the newest layout."""

    def __init__(self, path: Path | None, *, sync: bool = True, read_only: bool = False) -> None:
        """Open the file `path`, or a database in memory that is gone when it is closed.

        Without `sync` (simulations) a commit survives the end of this process, but not a power cut. `read_only` is for
        looking at a file that another thread or process writes.
        """
        with _disk_errors(f"cannot open {path or 'a database in memory'}"):
            self._connection = _connect_to_read(path) if read_only and path is not None else _connect(path, sync=sync)
            self._connection.row_factory = sqlite3.Row
            if not read_only:
                self._migrate()
        self.commits = GroupCommit(
            commit=self._connection.commit,
            rollback=self._roll_back,
            errors=lambda what: _disk_errors(f"cannot save ({what})"),
        )

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.rollback()

    def _migrate(self) -> None:
        try:
            (layout,) = self._connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as error:
            raise MachineError(f"state.db is damaged ({error}); restore a backup of the state directory") from error
        if layout > LAYOUT:
            raise MachineError(f"state.db has layout {layout}, this fedfit knows {LAYOUT}; upgrade fedfit")
        if layout == LAYOUT:
            return
        statements = SCHEMA if layout == 0 else "".join(MIGRATIONS[older] for older in range(layout, LAYOUT))
        try:
            self._connection.executescript(f"BEGIN; {statements} PRAGMA user_version = {LAYOUT}; COMMIT;")
        finally:
            if self._connection.in_transaction:
                self._connection.rollback()

    @contextmanager
    def transaction(self, point: str) -> Iterator[Transaction]:
        """All statements inside take effect, or none and an error is raised; durable as `turn` describes it."""
        with self.commits.write(point):
            yield Transaction(self._connection)

    def read(self, query: str, *arguments: object) -> list[sqlite3.Row]:
        """All rows of a query, as columns."""
        with _disk_errors("cannot read state.db"):
            try:
                return self._connection.execute(query, arguments).fetchall()
            except UnicodeEncodeError:  # half of a surrogate pair, typed by a person: no row has such a text
                return []

    def all(self, cls: type[R], query: str, *arguments: object) -> list[R]:
        """All rows of a query, as records of `cls`."""
        return [from_columns(cls, columns) for columns in self.read(query, *arguments)]

    def first(self, cls: type[R], query: str, *arguments: object) -> R | None:
        """The first row of a query, if there is one."""
        return next(iter(self.all(cls, query, *arguments)), None)

    def copy_to(self, path: Path) -> None:
        """Copy the database, as it was last committed, into a new file that only its owner may read."""
        with _disk_errors(f"cannot copy state.db to {path}"):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            copy = sqlite3.connect(path)
            try:
                self._connection.backup(copy)
            finally:
                copy.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _connect(path: Path | None, *, sync: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path or ":memory:", isolation_level="IMMEDIATE")
    if path is not None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        connection.execute(f"PRAGMA synchronous={'FULL' if sync else 'OFF'}")
        os.chmod(path, 0o600)
    connection.execute("PRAGMA foreign_keys=ON")
    return connection


def _connect_to_read(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0, isolation_level=None)


def read_meta(path: Path) -> dict[str, str]:
    """The epoch, the federation and the settings in a database that another process may have open; changes nothing."""
    with _disk_errors(f"cannot read {path}"):
        connection = _connect_to_read(path)
        try:
            return dict(connection.execute("SELECT key, value FROM meta"))
        finally:
            connection.close()


@contextmanager
def _disk_errors(attempt: str) -> Iterator[None]:
    """`durable.disk_errors`, and the same for errors of the disk that SQLite reports."""
    try:
        with durable.disk_errors(attempt):
            yield
    except sqlite3.OperationalError as error:
        kind = DiskFullError if "full" in str(error) else MachineError
        raise kind(f"{attempt}: {error}") from error
    except sqlite3.DatabaseError as error:
        if type(error) is not sqlite3.DatabaseError:  # a broken constraint is a bug of ours
            raise
        raise MachineError(f"{attempt}: {error}; restore a backup of the state directory") from error
