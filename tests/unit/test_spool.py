"""What a device remembers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from rows import PLAN, assign, digest

from edge_client import faults
from edge_client.errors import DiskFullError, MachineError
from edge_client.session import Finished
from edge_client.spool import Saved, Spool

UPDATE = Finished(sha256=digest("u"), length=5, num_samples=3)


def test_a_lease_and_its_update_survive_a_restart(tmp_path: Path) -> None:
    """With every field, the plan and the largest seed too; a new spool knows nothing."""
    path = tmp_path / "state.json"
    assert Spool(path).load() == Saved()
    work = assign(4, epoch=9, plan=PLAN, seed=2**63 - 1, learning_rate=0.1)
    Spool(path).save(work, None, 2)
    assert Spool(path).load() == Saved(assign=work, attempts=2, highest=(9, 4))
    Spool(path).save(work, UPDATE, 3)
    assert Spool(path).load() == Saved(assign=work, finished=UPDATE, attempts=3, highest=(9, 4))
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_the_highest_assignment_is_remembered_after_the_lease_is_over(tmp_path: Path) -> None:
    """So that an old assignment is not taken after a restart."""
    spool = Spool(tmp_path / "state.json")
    spool.save(assign(4, epoch=9), UPDATE, 1)
    spool.forget()
    assert spool.load() == Spool(tmp_path / "state.json").load() == Saved(highest=(9, 4))


@pytest.mark.parametrize("step", ["write", "sync", "rename"])
@pytest.mark.parametrize("what", ["assign", "update", "forget"])
def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, step: str) -> None:
    """Each of the three writes; the next try works."""
    path = tmp_path / "state.json"
    spool = Spool(path)
    spool.save(assign(1), None, 1)
    before = spool.load()
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"enospc:daemon.{what}.{step}")])
    writes: dict[str, Callable[[], None]] = {
        "assign": lambda: spool.save(assign(2), None, 1),
        "update": lambda: spool.save(assign(1), UPDATE, 1),
        "forget": spool.forget,
    }
    write = writes[what]
    with pytest.raises(DiskFullError):
        write()
    assert spool.load() == Spool(path).load() == before
    write()
    assert spool.load() == Spool(path).load() != before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 300,
        b"[" * 100_000,
        b"[]",
        json.dumps({"assign": {"lease": "of another version"}, "finished": None, "highest": [9, 4]}).encode(),
    ],
    ids=["empty", "zeros", "deep", "list", "version"],
)
def test_what_cannot_be_read_is_moved_aside_and_the_device_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """After a power cut on a bad card, or a downgrade; nothing counts as seen, so the lease offered again is taken."""
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        spool = Spool(path)
    assert spool.load() == Saved(highest=(0, 0))
    assert path.with_name("state.json.damaged").read_bytes() == content
    assert len(caplog.messages) == 1
    spool.save(assign(1), None, 1)
    assert Spool(path).load().assign == assign(1)


def test_a_disk_that_does_not_read_ends_the_client_with_its_name(tmp_path: Path) -> None:
    """That is not a damaged file: moving it aside would lose a lease that a repair of the machine saves."""
    (tmp_path / "state.json").mkdir()
    with pytest.raises(MachineError, match=r"state\.json"):
        Spool(tmp_path / "state.json")
