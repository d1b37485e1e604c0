"""The daemon step by step, over the hub in memory: its hellos, its tasks, its end."""

from __future__ import annotations

import hashlib

import pytest
from device_world import WORK, World, leave
from rows import assign

from edge_client.wire.messages import (
    Cancel,
    Hello,
    Welcome,
)


def test_a_device_that_waits_for_its_welcome_says_hello_when_the_coordinator_comes(world: World) -> None:
    """Its hello may have been lost; not when it is in."""
    world.start()
    assert len(world.messages(Hello)) == 1
    world.announce()
    assert len(world.messages(Hello)) == 2
    world.welcome()
    world.announce()
    assert len(world.messages(Hello)) == 2


def test_what_the_broker_retained_is_no_reason_for_a_second_hello(world: World) -> None:
    """Everybody who connects hears that the coordinator came once; a fleet that did so would say hello twice."""
    daemon = world.start()
    world.announce()
    num = len(world.messages(Hello))
    daemon._transport.drop()
    world.turn()
    assert len(world.messages(Hello)) == num + 1


def test_a_worker_is_told_to_end_before_the_loop_is(world: World) -> None:
    """The loop may wait for the network; the worker's grace period begins at the signal."""
    leave(world.folder, assign(parts=()))
    daemon = world.start()
    process = world.worker_process()
    daemon.request_stop()
    assert process.wait(10) == -15
    daemon.turn()  # its end is not taken for a crash
    assert daemon._session.state == "working"


def test_every_hello_has_the_hashes_of_the_tasks_as_they_are_then(world: World) -> None:
    """A task that is replaced while the daemon runs, and one that is not there."""
    path = world.folder / "defects.py"
    path.write_bytes(b"first")
    world.device_table["tasks"] = {"defects": f"{path}:task", "gone": "/no/such/file.py:task"}
    world.start()
    path.write_bytes(b"second")
    world.announce()
    assert [hello.tasks for hello in world.messages(Hello)] == [
        {"defects": hashlib.sha256(b"first").hexdigest()},
        {"defects": hashlib.sha256(b"second").hexdigest()},
    ]


def test_a_task_that_is_replaced_is_said_as_soon_as_the_device_is_idle(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator would leave the device out for ever; a lease in hand is not disturbed."""
    monkeypatch.setattr("edge_client.client.status._EVERY_S", 0.0)
    path = world.folder / "defects.py"
    path.write_bytes(b"first")
    world.device_table["tasks"] = {"defects": f"{path}:task"}
    world.start()
    world.welcome()
    world.say(WORK)
    path.write_bytes(b"mended")
    world.turn()
    assert len(world.messages(Hello)) == 1
    world.say(Cancel(lease=WORK.lease))
    world.turn()
    assert [hello.tasks for hello in world.messages(Hello)] == [
        {"defects": hashlib.sha256(b"first").hexdigest()},
        {"defects": hashlib.sha256(b"mended").hexdigest()},
    ]


def test_work_that_comes_right_behind_the_welcome_is_taken(world: World) -> None:
    """Both are read at once: the assignment belongs to the session that the welcome begins."""
    daemon = world.start()
    hello = world.messages(Hello)[-1]
    welcome = Welcome(boot=hello.boot, hello=hello.hello, session="s", epoch=1, heartbeat_s=60.0)
    for message, session in ((welcome, ""), (WORK, "s")):
        world.send(message, session)
    world.turn()
    assert daemon._session.assign == WORK
