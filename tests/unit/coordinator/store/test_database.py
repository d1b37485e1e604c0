"""The coordinator's database and the disk below it; the contract tests cover the store on top of it."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from coordinator.store.database import Database, _disk_errors
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
