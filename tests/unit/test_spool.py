"""What a device remembers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from rows import PLAN, assign, digest

from edge_client import faults
from edge_client.errors import DiskFullError
from edge_client.session import Finished
from edge_client.spool import Spool

UPDATE = Finished(sha256=digest("u"), length=5, num_samples=3)


def test_a_lease_and_its_update_survive_a_restart(tmp_path: Path) -> None:
    """With every field, the plan too; a new spool knows nothing."""
    spool = Spool(tmp_path / "state.db")
    assert spool.load() == (None, None, (0, 0))
    work = assign(4, epoch=9, plan=PLAN)
    spool.save(work, None)
    spool.close()
    spool = Spool(tmp_path / "state.db")
    assert spool.load() == (work, None, (9, 4))
    spool.save(work, UPDATE)
    spool.close()
    spool = Spool(tmp_path / "state.db")
    assert spool.load() == (work, UPDATE, (9, 4))
    spool.close()


def test_the_highest_assignment_is_remembered_after_the_lease_is_over(tmp_path: Path) -> None:
    """So that an old assignment is not taken after a restart."""
    spool = Spool(tmp_path / "state.db")
    spool.save(assign(4, epoch=9), UPDATE)
    spool.forget()
    assert spool.load() == (None, None, (9, 4))
    spool.close()


@pytest.mark.parametrize("point", ["daemon.assign.commit", "daemon.update.commit", "daemon.forget.commit"])
def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """Each of the three commits; the next try works."""
    spool = Spool(tmp_path / "state.db")
    spool.save(assign(1), None)
    before = spool.load()
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"enospc:{point}")])
    steps = {"assign": lambda: spool.save(assign(2), None), "update": lambda: spool.save(assign(1), UPDATE)}
    step = steps.get(point.split(".")[1], spool.forget)
    with pytest.raises(DiskFullError):
        step()
    assert spool.load() == before
    step()
    assert spool.load() != before
    spool.close()


def test_a_lease_of_another_version_is_forgotten(tmp_path: Path) -> None:
    """The coordinator assigns it again; the highest one seen stays."""
    spool = Spool(tmp_path / "state.db")
    spool.save(assign(4, epoch=9), UPDATE)
    spool._db.execute("UPDATE lease SET assign = x'80'")
    assert spool.load() == (None, None, (9, 4))
    spool.close()


def test_a_damaged_database_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A power cut on a bad card must not end in a loop of crashes: the device begins anew and says so."""
    path = tmp_path / "state.db"
    path.write_bytes(b"not a database" * 500)
    with caplog.at_level(logging.ERROR):
        spool = Spool(path)
    assert spool.load() == (None, None, (0, 0))
    spool.save(assign(1), None)
    spool.close()
    assert path.with_name("state.db.damaged").read_bytes().startswith(b"not a database")
    assert "is damaged" in caplog.text


def test_a_database_with_a_torn_page_is_moved_aside(tmp_path: Path) -> None:
    """Its header is right, its pages are not."""
    path = tmp_path / "state.db"
    spool = Spool(path)
    spool.save(assign(1), None)
    spool.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(bytes(data))
    spool = Spool(path)
    assert spool.load() == (None, None, (0, 0))
    spool.close()
