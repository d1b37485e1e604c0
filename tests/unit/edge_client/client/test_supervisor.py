"""What systemd hears of a daemon, on a socket of the test's own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import service_site
from device_world import World

from edge_client.client.supervisor import Supervisor


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """A notify socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def heard(listener: socket.socket) -> list[str]:
    """All datagrams so far."""
    said = []
    try:
        while True:
            said.append(listener.recv(4096).decode())
    except BlockingIOError:
        return said


def test_the_watchdog_is_fed_four_times_in_its_time_and_only_when_a_turn_was_done(systemd: socket.socket) -> None:
    """8 s are told: the first turn feeds, one at 1.9 s does not, one at 2 s does."""
    supervisor = Supervisor(systemd.getsockname(), watchdog_s=8.0)
    for now in (100.0, 101.9, 102.0, 103.0):
        supervisor.alive(now)
    assert heard(systemd) == ["WATCHDOG=1", "WATCHDOG=1"]


def test_the_same_status_is_told_once_and_in_one_line(systemd: socket.socket) -> None:
    """A name server's answer may have any line in it."""
    supervisor = Supervisor(systemd.getsockname())
    for text in ("idle", "idle", "training\nREADY=1"):
        supervisor.doing(text)
    assert heard(systemd) == ["STATUS=idle", "STATUS=training READY=1"]


def test_what_systemd_says_is_for_this_process_alone() -> None:
    """A worker must not find the socket; a watchdog of another process is not ours."""
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1", "PATH": "/bin"}
    supervisor = Supervisor.from_environment(environment)
    assert environment == {"PATH": "/bin"}
    assert supervisor._every_s is None
    ours = Supervisor.from_environment({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())})
    assert ours._every_s == 0.75


@pytest.mark.parametrize("address", ["", "vsock:2:1", "/nowhere/at/all", "@nobody-listens-there"])
def test_a_supervisor_that_is_not_there_is_no_error(address: str) -> None:
    """A client that somebody starts by hand."""
    supervisor = Supervisor.from_environment({"NOTIFY_SOCKET": address})
    supervisor.ready()
    supervisor.stopping()


def test_an_abstract_socket_is_reached() -> None:
    """Containers get one: `@name` stands for a zero byte and the name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0fedfit-test-{os.getpid()}")
        Supervisor(f"@fedfit-test-{os.getpid()}").ready()
        assert listener.recv(100) == b"READY=1"


def test_every_turn_of_the_daemon_feeds_the_watchdog(tmp_path: Path, systemd: socket.socket) -> None:
    """The loop itself does it: no turn, no food."""
    world = World(tmp_path / "state")
    (tmp_path / "state").mkdir()
    daemon = world.start()
    daemon._supervisor = Supervisor(systemd.getsockname(), watchdog_s=1e-9)
    daemon.turn()
    daemon.turn()
    assert heard(systemd).count("WATCHDOG=1") == 2
    daemon.shut_down()


class _Nobody:
    """Nobody asks the coordinator for anything."""

    def fds(self) -> list[int]:
        return []

    def serve(self, ready: list[int]) -> None:
        assert ready == []


def test_every_turn_of_the_coordinator_feeds_the_watchdog_and_tells_what_it_does(
    tmp_path: Path, systemd: socket.socket
) -> None:
    """Two devices are enrolled, none is there."""
    site = service_site.Site(tmp_path)
    with site.serving() as service:
        service._supervisor = Supervisor(systemd.getsockname(), watchdog_s=1e-9)
        service._broker = None  # a tick would start it
        service._turn(_Nobody())  # type: ignore[arg-type]
        service._turn(_Nobody())  # type: ignore[arg-type]
    said = heard(systemd)
    assert said.count("WATCHDOG=1") == 2
    assert said.count("STATUS=0 of 2 devices online") == 1
    site.store.close()
