"""What a device remembers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from rows import PLAN, assign, digest

from edge_client import faults
from edge_client.client.events import Finished
from edge_client.client.spool import Saved, Spool
from edge_client.errors import DiskFullError, MachineError
from edge_client.records import Ceiling

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


def _ceiling(training_bytes: int, budget_bytes: int, key: str = "model") -> Ceiling:
    return Ceiling(key=digest(key), training_bytes=training_bytes, budget_bytes=budget_bytes)


def test_what_was_too_much_is_remembered_over_leases_and_restarts(tmp_path: Path) -> None:
    """With the next save or the end of the lease; the counts are those of the lease and go with it."""
    path = tmp_path / "state.json"
    spool = Spool(path)
    spool.remember(_ceiling(50, 300))
    assert Spool(path).load() == Saved()
    spool.save(assign(), None, 2, 3)
    saved = Spool(path).load()
    assert (saved.attempts, saved.replans, saved.ceilings) == (2, 3, (_ceiling(50, 300),))
    spool.remember(_ceiling(40, 300))
    spool.forget()
    assert Spool(path).load() == Saved(highest=(1, 1), ceilings=(_ceiling(40, 300),))


def test_a_ceiling_holds_for_budgets_that_are_not_larger(tmp_path: Path) -> None:
    """50 was too much for 300, 150 for 500: up to 300 stay below 50, up to 500 below 150, beyond nothing is known."""
    spool = Spool(tmp_path / "state.json")
    for ceiling in (_ceiling(50, 300), _ceiling(150, 500), _ceiling(9, 400, "other")):
        spool.remember(ceiling)
    model, other = digest("model"), digest("other")
    assert spool.ceilings(300) == {model: 50, other: 9}
    assert spool.ceilings(301) == {model: 150, other: 9}
    assert spool.ceilings(500) == {model: 150}
    assert spool.ceilings(501) == {}


def test_a_ceiling_that_says_less_than_a_new_one_is_dropped(tmp_path: Path) -> None:
    """40 too much for 300 implies 50 too much for 200; at most 64 are kept, the newest."""
    spool = Spool(tmp_path / "state.json")
    for ceiling in (_ceiling(50, 200), _ceiling(30, 100), _ceiling(40, 300)):
        spool.remember(ceiling)
    assert spool.load().ceilings == (_ceiling(30, 100), _ceiling(40, 300))
    for number in range(70):
        spool.remember(_ceiling(1, 1, f"model {number}"))
    assert [c.key for c in spool.load().ceilings] == [digest(f"model {number}") for number in range(6, 70)]


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
