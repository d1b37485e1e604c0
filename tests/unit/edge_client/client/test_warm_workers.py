"""When a device has a template of workers: while a run is on, and nothing else needs its memory. Real processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest
from device_world import World
from rows import assign

from edge_client.client import warm_workers
from edge_client.client.instructions import Start
from edge_client.client.template import Template
from edge_client.wire.messages import Cancel, Decline

# a template whose workers run what stands in the file `code` of the folder above the assignment's
FORKS = """
import sys
from pathlib import Path
from edge_client.worker import process, template
def carry_out(folder, *, is_fork):
    exec((folder.parent.parent / "code").read_text())
process.carry_out = carry_out
sys.exit(template.main(sys.argv[1:]))
"""
SLEEPS = "import time; time.sleep(60)"
FINISHES = """
(folder / "update.bin").write_bytes(b"abc")
(folder / "update.json").write_text('{"sha256": "%s", "length": 3, "num_samples": 1}')
sys.exit(0)
""" % ("0" * 64)
DECLINES = """
(folder / "error.json").write_text('{"code": "%s", "detail": ""}')
sys.exit(77)
"""


@pytest.fixture
def warm(world: World) -> World:
    """The device's workers are forks; those that are not sleep, too."""
    world.template_command = (sys.executable, "-c", FORKS)
    (world.folder / "code").write_text(SLEEPS)
    return world


def _template(world: World) -> Template | None:
    assert world.daemon is not None
    return world.daemon._worker._warm._template


def _wait_for_worker(world: World) -> psutil.Process:
    """Until the template has loaded, and the worker has been forked or started."""
    assert world.daemon is not None
    deadline = time.monotonic() + 60
    while world.daemon._worker._worker is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        world.turn()
    return psutil.Process(world.daemon._worker._worker.pid)


def _meminfo(root: Path, available_mb: int) -> None:
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 4000000 kB\nMemAvailable: {available_mb * 1000} kB\n")


def test_one_template_serves_a_run_and_ends_with_it(warm: World) -> None:
    """It begins before the parts are here; the second worker is another fork of it; the last evaluation ends it."""
    daemon = warm.start()
    warm.welcome()
    warm.say(assign())
    template = _template(warm)
    assert template is not None
    assert not daemon._worker.is_running  # the parts have not come
    for issue in (2, 3):
        warm.say(assign(issue, parts=()))
        assert daemon._worker.is_running
        assert _wait_for_worker(warm).ppid() == template.pid
    (warm.folder / "code").write_text(FINISHES)
    warm.say(assign(4, round=3, train=False, parts=()))
    while _template(warm) is not None:
        warm.turn()
    assert not psutil.pid_exists(template.pid)
    assert warm.messages(Decline) == []


def test_a_template_ends_when_there_is_no_work_or_too_little_memory(
    warm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own memory is what a worker would use, and so no reason: 0.8 x (711 + what it has - 128) is the budget."""
    warm.device_table, warm.root = {}, warm.folder / "root"
    _meminfo(warm.root, 1500)
    daemon = warm.start()
    warm.welcome()
    (warm.folder / "code").write_text(FINISHES)
    for issue, reason in ((1, "memory"), (2, "idle")):
        warm.say(assign(issue, parts=()))
        while daemon._worker.is_running:
            warm.turn()
        template = _template(warm)
        assert template is not None
        warm.turn()
        assert _template(warm) is template
        if reason == "memory":
            _meminfo(warm.root, 600)
        else:
            monkeypatch.setattr(warm_workers, "IDLE_S", 0.0)
        daemon._worker._look_at = 0.0
        warm.turn()
        assert _template(warm) is None
        assert not psutil.pid_exists(template.pid)
        _meminfo(warm.root, 1500)


def test_a_fork_without_room_is_followed_by_a_process_of_its_own(warm: World) -> None:
    """For the whole run if nothing fits beside a template, else once; the coordinator hears nothing of it."""
    daemon = warm.start()
    warm.welcome()
    (warm.folder / "code").write_text(DECLINES % "nothing_fits")
    for issue in (1, 2):
        warm.say(assign(issue, parts=()))
        while _template(warm) is not None:
            warm.turn()
        assert _wait_for_worker(warm).ppid() == psutil.Process().pid
    (warm.folder / "code").write_text(DECLINES % "calibration")
    warm.say(assign(3, run="r-2", parts=()))
    while _template(warm) is not None:
        warm.turn()
    assert _wait_for_worker(warm).ppid() == psutil.Process().pid
    warm.say(assign(4, run="r-2", parts=()))
    assert _template(warm) is not None
    assert warm.messages(Decline) == []
    assert daemon._session._attempts == 1


def test_without_a_template_workers_start_as_before(warm: World) -> None:
    """It is killed while it loads; a dry run has none, and neither has a device that cannot fork."""
    warm.start()
    warm.welcome()
    warm.say(assign(parts=()))
    template = _template(warm)
    assert template is not None
    psutil.Process(template.pid).kill()
    while _template(warm) is template:
        warm.turn()
    assert _wait_for_worker(warm).ppid() == psutil.Process().pid
    warm.say(assign(2, train=False, evaluate=False, parts=()))
    assert _template(warm) is None


def test_a_stopped_lease_is_not_begun_when_the_template_is_ready(warm: World) -> None:
    """Neither is one that the client's end comes before: no process is left."""
    daemon = warm.start()
    warm.welcome()
    warm.say(assign(parts=()))
    template = _template(warm)
    assert template is not None
    warm.say(Cancel(lease="lease-1"))
    while not template.is_ready:
        warm.turn()
    warm.turn()
    assert not daemon._worker.is_running
    daemon.shut_down()
    assert not psutil.pid_exists(template.pid)


def test_a_start_that_waits_for_its_template_is_given_up_with_the_device(warm: World) -> None:
    """`request_stop` while torch loads: nothing is started any more."""
    daemon = warm.start()
    warm.welcome()
    instruction = Start(assign(parts=()))
    daemon._worker.start(instruction)
    daemon.request_stop()
    assert not daemon._worker.is_running
