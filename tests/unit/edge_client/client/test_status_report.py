"""The status of a daemon while it works."""

from __future__ import annotations

from device_world import WORK, World

from edge_client.client.status import read_status
from edge_client.transport.base import Disconnected


def test_the_status_follows_the_daemon(world: World) -> None:
    """Connected, let in, a lease with its run and round, its receipt, an error, the end."""
    daemon = world.start()
    assert daemon._status.status().link == "connected"
    world.welcome()
    assert (daemon._status.status().link, daemon._status.status().state) == ("let_in", "idle")
    world.say(WORK)
    told = daemon._status.status()
    assert (told.state, told.lease, told.run, told.round, told.phase) == ("fetching", "lease-1", "r-1", 1, "fetch")
    daemon._on_transport(Disconnected(reason="gone", code="network"))
    assert daemon._status.status().link == "connecting"
    assert daemon._status.status().error is not None
    daemon.shut_down()
    written = read_status(world.folder / "status.json")
    assert written is not None
    assert (written.link, written.run) == ("stopped", "r-1")
