"""The coordinator's database and the disk below it; what the store says is in the contract tests."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from coordinator.store import sqlite
from edge_client import faults
from edge_client.errors import DiskFullError, MachineError


def test_a_failed_commit_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is not there, and the connection goes on."""
    db = sqlite._open_database(tmp_path / "x.db")
    db.execute("CREATE TABLE t (v)")
    db.commit()
    db.execute("INSERT INTO t VALUES (1)")
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:p.commit")])
    with pytest.raises(OSError, match="injected"):
        sqlite._commit(db, point="p")
    assert not db.in_transaction
    db.execute("INSERT INTO t VALUES (2)")
    sqlite._commit(db, point="p")
    assert db.execute("SELECT v FROM t").fetchall() == [(2,)]
    db.close()


def test_the_database_survives_power_cuts_and_is_private(tmp_path: Path) -> None:
    """WAL with every commit synced; mode 0600, its companions too."""
    db = sqlite._open_database(tmp_path / "x.db")
    db.execute("CREATE TABLE t (v)")
    db.commit()
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert db.execute("PRAGMA foreign_keys").fetchone() == (1,)
    assert {entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()} == {0o600}
    db.close()


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
    with pytest.raises(MachineError, match="cannot do it") as caught, sqlite._disk_errors("cannot do it"):
        raise error
    assert type(caught.value) is kind


def test_a_broken_constraint_stays_what_it_is() -> None:
    """It is a bug of ours, not of the machine."""
    with pytest.raises(sqlite3.IntegrityError), sqlite._disk_errors("x"):
        raise sqlite3.IntegrityError("UNIQUE")
