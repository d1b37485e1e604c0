"""The coordinator's database and the disk below it; the contract tests cover the store on top of it."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest
from rows import run_row
from stores import with_round

from coordinator.store.database import Database, _disk_errors
from coordinator.store.sqlite import SqliteStore
from edge_client import faults
from edge_client.errors import DiskFullError, MachineError


def test_a_failed_commit_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first setting is not there, and the second one can be written."""
    database = Database(None)
    with monkeypatch.context() as patch:
        patch.setattr(faults, "_faults", [faults._parse("enospc:store.p.commit")])
        with pytest.raises(DiskFullError, match="cannot save"), database.transaction("p") as transaction:
            transaction.execute("INSERT INTO meta VALUES ('first', '')")
    with database.transaction("p") as transaction:
        transaction.execute("INSERT INTO meta VALUES ('second', '')")
    assert [row["key"] for row in database.read("SELECT key FROM meta")] == ["second"]
    database.close()


def test_an_exception_rolls_a_transaction_back() -> None:
    """Whatever it is; nothing of the transaction stays."""
    database = Database(None)
    with pytest.raises(ZeroDivisionError), database.transaction("p") as transaction:
        transaction.execute_many("INSERT INTO meta VALUES (?, '')", ((str(1 // n),) for n in (1, 0)))
    assert database.read("SELECT key FROM meta") == []
    database.close()


def test_the_database_survives_power_cuts_and_is_private(tmp_path: Path) -> None:
    """WAL with every commit synced (FULL is 2); mode 0600, its companions too."""
    database = Database(tmp_path / "x.db")
    with database.transaction("p") as transaction:
        transaction.execute("INSERT INTO meta VALUES ('k', 'v')")
    pragmas = ("journal_mode", "synchronous", "foreign_keys")
    assert [tuple(database.read(f"PRAGMA {name}")[0]) for name in pragmas] == [("wal",), (2,), (1,)]
    assert {entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()} == {0o600}
    database.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "full"), DiskFullError),
        (OSError(errno.EIO, "broken"), MachineError),
        (sqlite3.OperationalError("database or disk is full"), DiskFullError),
        (sqlite3.OperationalError("disk I/O error"), MachineError),
        (sqlite3.DatabaseError("file is not a database"), MachineError),
    ],
)
def test_errors_of_the_disk_become_ours(error: Exception, kind: type[MachineError]) -> None:
    """A full disk passes alone; the rest does not."""
    with pytest.raises(MachineError, match="cannot do it") as caught, _disk_errors("cannot do it"):
        raise error
    assert type(caught.value) is kind


def test_a_broken_constraint_stays_what_it_is() -> None:
    """It is a bug of ours, not of the machine."""
    with pytest.raises(sqlite3.IntegrityError), _disk_errors("x"):
        raise sqlite3.IntegrityError("UNIQUE")


def test_what_was_not_committed_is_gone_after_a_crash(tmp_path: Path) -> None:
    """A second connection reads the file as the next process would."""
    store = SqliteStore(tmp_path / "state.db")
    with_round(store)
    store._database._connection.execute("UPDATE round SET state = 'FROZEN'")
    other = sqlite3.connect(tmp_path / "state.db")
    assert other.execute("SELECT state FROM round").fetchall() == [("RUNNING",)]
    other.close()
    store._database._connection.rollback()
    store.close()


def test_a_database_that_breaks_in_use_is_reported(tmp_path: Path) -> None:
    """Pages of an open database are overwritten: reading ends with one line, not with a traceback."""
    store = SqliteStore(tmp_path / "state.db")
    for number in range(200):
        store.runs.add(run_row(f"r-{number}"))
    store._database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._database._connection.execute("PRAGMA cache_size = 0")
    size = (tmp_path / "state.db").stat().st_size
    with open(tmp_path / "state.db", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    store._database._connection.execute("PRAGMA shrink_memory")
    with pytest.raises(MachineError, match="cannot read"):
        store.runs.all()
    store.close()


@pytest.mark.parametrize("content", [b"not a database" * 400, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_database_is_reported(tmp_path: Path, content: bytes) -> None:
    """One line tells what to do; there is no traceback."""
    (tmp_path / "state.db").write_bytes(content)
    with pytest.raises(MachineError, match="restore a backup"):
        SqliteStore(tmp_path / "state.db")


def test_a_newer_layout_is_refused(tmp_path: Path) -> None:
    """The message asks to upgrade fedfit."""
    store = SqliteStore(tmp_path / "state.db")
    store._database._connection.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(MachineError, match="upgrade fedfit"):
        SqliteStore(tmp_path / "state.db")
