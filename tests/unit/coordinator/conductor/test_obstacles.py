"""Which devices a run does not ask, remembered."""

from __future__ import annotations

from rows import PROFILE, device_row, run_file

from coordinator.conductor.obstacles import Obstacles
from coordinator.fleet.roster import Roster
from edge_client.wire.messages import Hello, context_up, seal_message


def _hello(roster: Roster, name: str, **labels: str) -> None:
    hello = Hello(boot="boot", hello=1, profile=PROFILE, labels=labels, free_bytes=5)
    key = bytes.fromhex(device_row(name).key)
    roster.receive(name, seal_message(hello, session="", seq=0, key=key, context=context_up("fed", name)), 0.0)


def test_a_hello_and_new_labels_are_seen_at_once() -> None:
    """The run wants line=a: the device says so in its second hello, and the coordinator's label takes it away again."""
    roster = Roster("fed", [device_row("a"), device_row("b")], epoch=1, heartbeat_s=10.0)
    file, obstacles = run_file(devices={"where": ["line=a"]}), Obstacles(roster)
    _hello(roster, "a")
    _hello(roster, "b", line="a")
    online = roster.online(0.0)
    assert obstacles.barred(file, online) == {"a"}
    assert obstacles.barred(file, online) is obstacles.barred(file, online)
    _hello(roster, "a", line="a")
    assert roster.online(0.0) is online
    assert obstacles.barred(file, online) == frozenset()
    roster.set_devices([device_row("a", labels={"line": "b"}), device_row("b")])
    assert obstacles.barred(file, online) == {"a"}


def test_another_run_is_looked_at_anew() -> None:
    """Nobody is kept out of a run that wants no label."""
    roster = Roster("fed", [device_row("a")], epoch=1, heartbeat_s=10.0)
    _hello(roster, "a")
    obstacles = Obstacles(roster)
    assert obstacles.barred(run_file(devices={"where": ["line=a"]}), roster.online(0.0)) == {"a"}
    assert obstacles.barred(run_file(), roster.online(0.0)) == frozenset()
