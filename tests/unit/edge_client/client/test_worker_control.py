"""The worker as its daemon looks after it: its failures, its memory, its budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from device_world import World, leave
from rows import PLAN, assign, digest

from edge_client.client.spool import Spool
from edge_client.records import Ceiling, to_map
from edge_client.wire.messages import Decline, Offer
from edge_client.worker.live_files import Trial, write_trial


def test_what_a_worker_died_of_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Its owner reads the log of the client; the work directory is gone by then. One line, whatever the text."""
    leave(world.folder, assign(parts=()))
    world.start()
    text = json.dumps({"code": "x", "detail": "two\nlines \x1b[31m"})
    (world.folder / "work" / "lease-1" / "error.json").write_text(text)
    world.worker_process().kill()
    world.worker_ends()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "the worker failed: crashed: two lines ?[31m"
    ]


# its update is complete, and its process does not end
WRITES = """
import json, os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
def say(line):
    os.write(int(os.environ["FEDFIT_PROGRESS_FD"]), json.dumps(line | {"loss": None}).encode() + b"\\n")
(here / "update.bin").write_bytes(b"abc")
if here.name != "lease-1":
    (here / "update.json").write_text('{"sha256": "DIGEST", "length": 3, "num_samples": 1}')
say({"phase": "write", "step": 1, "total": 1})
time.sleep(60)
""".replace("DIGEST", digest("u"))


def test_an_update_is_offered_when_it_is_complete_whether_or_not_its_process_has_ended(world: World) -> None:
    """The process is ended when its memory is needed, and with the client. A line alone completes nothing."""
    world.worker_code = WRITES
    daemon = world.start()
    world.welcome()
    world.say(assign(parts=()))
    first = world.worker_process().pid
    for _ in range(5):
        world.turn()
    assert world.messages(Offer) == []
    world.say(assign(2, parts=()))
    assert not psutil.pid_exists(first)
    second = world.worker_process().pid
    while not world.messages(Offer):
        world.turn()
    assert psutil.pid_exists(second)
    assert not daemon._worker.is_running
    world.say(assign(3, parts=()))
    assert not psutil.pid_exists(second)
    third = world.worker_process().pid
    while len(world.messages(Offer)) < 2:
        world.turn()
    daemon.shut_down()
    assert not psutil.pid_exists(third)


TRIAL = Trial(key=digest("model"), budget_bytes=10**9, plan=replace(PLAN, training_bytes=500))
EXCEEDED = Ceiling(key=digest("model"), training_bytes=500, budget_bytes=10**9)
# over its budget, unless it is told that 500 bytes are too much
TRIES = f"""
import json, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
order = json.loads((here / "order.json").read_text())
if min([order["ceiling_bytes"] or 501, *order["ceilings"].values()]) > 500:
    (here / "plan.json").write_text({json.dumps(to_map(TRIAL))!r})
    sys.exit(75)
time.sleep(60)
"""


def test_a_worker_over_its_budget_is_followed_by_one_with_a_smaller_plan_also_in_later_work(world: World) -> None:
    """One failure in the lease; what was too much is on disk before the next one starts; the next lease knows it."""
    world.worker_code = TRIES
    world.start()
    world.welcome()
    world.say(assign(parts=()))
    world.worker_ends()
    order, saved = world.order(), world.saved()
    assert (order.ceiling_bytes, order.replans, order.ceilings) == (500, 1, {digest("model"): 500})
    assert (saved.attempts, saved.replans, saved.ceilings) == (1, 1, (EXCEEDED,))
    assert world.messages(Decline) == []
    world.say(assign(2, run="r-2", parts=()))
    order, saved = world.order("lease-2"), world.saved()
    assert (order.ceiling_bytes, order.replans, order.ceilings) == (None, 0, {digest("model"): 500})
    assert (saved.replans, saved.ceilings) == (0, (EXCEEDED,))


def test_a_device_with_more_memory_than_then_forgets_what_was_too_much(world: World) -> None:
    """1 GB then, 2 GB now."""
    spool = Spool(world.folder / "state.json")
    spool.remember(EXCEEDED)
    spool.save(assign(parts=()), None, 1)
    world.device_table = {"limits": {"memory": "2GB"}}
    world.start()
    assert world.order().ceilings == {}


def test_a_worker_that_went_over_its_budget_before_the_daemon_was_killed_is_not_repeated(world: World) -> None:
    """It left what it tried and how that ended; the next one starts with the smaller plan at once."""
    work = world.folder / "work/lease-1"
    work.mkdir(parents=True)
    leave(world.folder, assign(parts=()))
    write_trial(work, TRIAL)
    (work / "error.json").write_text('{"code": "over_budget", "detail": "3 GB"}')
    world.start()
    assert (world.order().ceiling_bytes, world.order().replans) == (500, 1)
    assert (world.saved().attempts, world.saved().replans) == (1, 1)
    assert not (work / "plan.json").exists()


def _meminfo(root: Path, available_mb: int) -> None:
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1000000 kB\nMemAvailable: {available_mb * 1000} kB\n")


def _told(world: World) -> int | None:
    """The budget that the worker was told after its start; the daemon looks again."""
    assert world.daemon is not None
    world.daemon._worker._look_at = 0.0
    world.turn()
    note = world.folder / "work/lease-1/budget.json"
    return int(json.loads(note.read_text())["budget_bytes"]) if note.exists() else None


def test_a_worker_is_told_when_others_take_its_memory(world: World) -> None:
    """0.8 x (728.064 - 128) = 480.05 MB; 30 MB less is noise, 102.4 MB less is not, and neither is what follows it.

    The worker is a Python that sleeps: up to 30 MB of its own are added.
    """
    world.device_table, world.root = {}, world.folder / "root"
    _meminfo(world.root, 711)
    leave(world.folder, assign(parts=()))
    world.start()
    assert world.order().budget_bytes == 480_051_200
    _meminfo(world.root, 682)
    assert _told(world) is None
    _meminfo(world.root, 572)
    told = _told(world)
    assert told is not None
    assert 0 <= told - 366_182_400 < 24_000_000  # 0.8 x (585.728 - 128)
    _meminfo(world.root, 711)
    assert _told(world) == told  # it may be needed again: only the next worker gets more


def test_a_device_that_has_little_memory_for_a_while_is_asked_again(world: World) -> None:
    """Nothing fits what others left: that is no lasting reason. With its usual memory it is."""
    world.worker_code = (
        "import pathlib, sys\nhere = pathlib.Path(sys.argv[1])\n"
        '(here / \'error.json\').write_text(\'{"code": "nothing_fits", "detail": "too large"}\')\nsys.exit(76)'
    )
    world.device_table, world.root = {}, world.folder / "root"
    _meminfo(world.root, 711)
    world.start()
    world.welcome()
    _meminfo(world.root, 400)
    world.say(assign(parts=()))
    assert world.order().budget_bytes == 225_280_000  # 0.8 x (409.6 - 128)
    world.worker_ends()
    _meminfo(world.root, 711)
    world.say(assign(2, parts=()))
    assert world.order("lease-2").budget_bytes == 480_051_200
    world.worker_ends()
    first, second = world.messages(Decline)
    assert isinstance(first, Decline)
    assert isinstance(second, Decline)
    assert (first.code, second.code) == ("low_memory", "nothing_fits")
    assert first.detail == "too large; other programs use the memory: usually the budget is 480 MB"
