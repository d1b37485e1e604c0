"""What a power cut or a restart leaves of a lease: its update, the states of methods, the lease itself."""

from __future__ import annotations

import json
from pathlib import Path

from device_world import UPDATE, WORK, World, leave
from rows import assign

from edge_client.client.spool import Saved
from edge_client.wire.messages import (
    Grant,
    Offer,
    Pull,
    Receipt,
)


def _finished(folder: Path) -> None:
    work = folder / "work" / WORK.lease
    work.mkdir(parents=True)
    (work / "update.bin").write_bytes(b"abc")
    (work / "update.json").write_text(json.dumps({"sha256": UPDATE.sha256, "length": 3, "num_samples": 1}))


def test_an_update_that_is_gone_after_a_restart_is_trained_again(world: World) -> None:
    """The state says finished, the folder is not there: as after a power cut."""
    leave(world.folder, WORK, UPDATE)
    world.start()
    world.welcome()
    assert world.saved() == Saved(assign=WORK, attempts=1, highest=(1, 1))
    assert world.messages(Offer) == []
    assert len(world.messages(Pull)) == 1


def test_an_update_that_is_gone_when_it_is_asked_for_is_trained_again(world: World) -> None:
    """A grant must not end the daemon again and again."""
    leave(world.folder, WORK, UPDATE)
    _finished(world.folder)
    world.start()
    world.welcome()
    assert len(world.messages(Offer)) == 1
    (world.folder / "work" / WORK.lease / "update.bin").unlink()
    world.say(Grant(lease=WORK.lease, sha256=UPDATE.sha256, ranges=((0, 1),)))
    assert world.saved().finished is None
    assert len(world.messages(Pull)) == 1


def test_the_state_of_methods_goes_when_another_run_begins(world: World) -> None:
    """It stays between the rounds of its own run, and while the device is idle."""
    for run in ("r-0", "r-1"):
        (world.folder / "method-state" / run).mkdir(parents=True)
        (world.folder / "method-state" / run / "current").touch()
    world.start()
    world.welcome()
    assert len(list((world.folder / "method-state").iterdir())) == 2
    world.say(WORK)
    assert [entry.name for entry in (world.folder / "method-state").iterdir()] == ["r-1"]


# a method that adds an x to its state in every round
KEEPING = f"""
import json, pathlib, sys
here = pathlib.Path(sys.argv[1])
kept = pathlib.Path(json.loads((here / "order.json").read_text())["method_state"])
before = (kept / "current").read_text() if (kept / "current").exists() else ""
(kept / "next").write_text(before + "x")
(here / "update.bin").write_bytes(b"abc")
(here / "update.json").write_text(json.dumps({{"sha256": "{UPDATE.sha256}", "length": 3, "num_samples": 1}}))
"""


def test_the_state_of_a_method_counts_exactly_if_its_update_does(world: World) -> None:
    """Updates 1 and 2 are received, and their rounds abandoned; 3 goes into a model, 4 not, 5 does.

    The worker of 1, 2 and 3 begins with nothing, that of 4 and 5 with one x, that of 6 with two.
    """
    world.worker_code = KEEPING
    daemon = world.start()
    world.welcome()
    folder, begun = world.folder / "method-state/r-1", []
    for issue, counted in enumerate((None, None, None, "lease-3", "lease-3", "lease-5"), start=1):
        world.say(assign(issue, parts=(), counted=counted))
        world.worker_ends()
        begun.append(len((folder / "next").read_text()) - 1)
        world.say(Receipt(lease=f"lease-{issue}", sha256=UPDATE.sha256, status="accepted", code="ok"))
        assert world.saved().assign is None
        if issue in (2, 3):
            daemon.shut_down()
            daemon = world.start()
            world.welcome()
    assert begun == [0, 0, 0, 1, 1, 2]


def test_the_state_of_a_method_waits_while_its_update_is_in_hand(world: World) -> None:
    """The client died after the receipt, before it forgot the lease: the receipt comes again, the state is there."""
    leave(world.folder, WORK, UPDATE)
    _finished(world.folder)
    folder = world.folder / "method-state" / WORK.run
    folder.mkdir(parents=True)
    (folder / f"stored-{WORK.lease}").touch()
    world.start()
    world.welcome()
    world.say(Receipt(lease=WORK.lease, sha256=UPDATE.sha256, status="accepted", code="ok"))
    assert [entry.name for entry in folder.iterdir()] == [f"stored-{WORK.lease}"]


def test_a_lease_that_was_lost_with_the_state_is_taken_again(world: World) -> None:
    """The coordinator offers it again; to decline it as an old one would lose the round."""
    leave(world.folder, WORK)
    (world.folder / "state.json").write_bytes(b"\0" * 100)
    world.start()
    world.welcome()
    world.say(WORK)
    assert world.saved().assign == WORK
