"""Sessions, presence, and two clients with one name."""

from __future__ import annotations

from typing import Any

import pytest
from rows import PROFILE, device_row

from coordinator.fleet.roster import Roster
from edge_client.errors import PayloadError
from edge_client.wire.messages import (
    Accept,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refuse,
    Welcome,
    context_down,
    context_up,
    open_message,
    seal_message,
)


class Client:
    """A device's side of the wire."""

    def __init__(self, roster: Roster, boot: str, name: str = "a") -> None:
        self.roster, self.boot, self.name = roster, boot, name
        self.key = bytes.fromhex(device_row(name).key)
        self.session, self.seq, self.hellos = "", 0, 0

    def seal(self, message: Message, **changes: Any) -> bytes:
        fields: dict[str, Any] = {"session": self.session, "seq": self.seq, "key": self.key}
        self.seq += 1
        return seal_message(message, **fields | {"context": context_up("fed", self.name)} | changes)

    def say(self, message: Message, now: float) -> tuple[Message | None, Message | None]:
        heard, reply = self.roster.receive(self.name, self.seal(message), now)
        return heard, self.open(reply) if reply is not None else None

    def open(self, data: bytes) -> Message:
        return open_message(data, key=self.key, context=context_down("fed", self.name)).message

    def hello(self, now: float, **changes: Any) -> Message | None:
        self.hellos += 1
        fields = {"boot": self.boot, "hello": self.hellos, "profile": PROFILE, "labels": {}, "free_bytes": 5}
        _, reply = self.say(Hello(**fields | changes), now)
        if isinstance(reply, Welcome):
            self.session, self.seq = reply.session, 0
        return reply


def _roster(*names: str) -> Roster:
    return Roster("fed", [device_row(name) for name in names or ("a", "b")], epoch=9, heartbeat_s=10.0)


def test_a_hello_is_welcomed_and_opens_a_session() -> None:
    """The answer names the boot and the hello it answers."""
    roster = _roster()
    client = Client(roster, "boot-1")
    welcome = client.hello(0.0)
    assert isinstance(welcome, Welcome)
    assert (welcome.boot, welcome.hello, welcome.epoch, welcome.heartbeat_s) == ("boot-1", 1, 9, 10.0)
    assert client.say(Accept(lease="x"), 1.0) == (Accept(lease="x"), None)
    assert roster.online(1.0) == {"a"}


def test_presence_is_the_age_of_the_last_word() -> None:
    """Two and a half heartbeats of 10 s; a chunk counts as a word; a goodbye ends it at once."""
    roster = _roster()
    client = Client(roster, "boot-1")
    client.hello(0.0)
    assert roster.online(25.0) == {"a"}
    assert roster.online(25.1) == frozenset()
    assert roster.seen("a", 30.0)
    assert roster.online(55.0) == {"a"}
    client.say(Goodbye(), 56.0)
    assert roster.online(56.0) == frozenset()
    assert not roster.seen("b", 1.0)


def test_each_message_is_taken_once() -> None:
    """A replay is refused."""
    roster = _roster()
    client = Client(roster, "boot-1")
    client.hello(0.0)
    sealed = client.seal(Accept(lease="x"))
    roster.receive("a", sealed, 1.0)
    with pytest.raises(PayloadError, match="replayed"):
        roster.receive("a", sealed, 1.1)


def test_another_key_another_device_or_another_way_is_forged() -> None:
    """The key of b, b's topic, a message that travels down, a name that nobody enrolled."""
    roster = _roster()
    client = Client(roster, "boot-1")
    client.hello(0.0)
    wrong_key = client.seal(Accept(lease="x"), key=bytes.fromhex(device_row("b").key))
    for name, payload in (("a", wrong_key), ("b", client.seal(Accept(lease="x")))):
        with pytest.raises(PayloadError, match="forged"):
            roster.receive(name, payload, 1.0)
    down = client.seal(Accept(lease="x"), context=context_down("fed", "a"))
    with pytest.raises(PayloadError, match="forged"):
        roster.receive("a", down, 1.0)
    with pytest.raises(PayloadError, match="unknown_device"):
        roster.receive("stranger", wrong_key, 1.0)
    assert roster.presence("b") is None


def test_after_a_restart_of_the_coordinator_devices_are_asked_for_a_hello() -> None:
    """The new roster knows no session; the answer is for any boot, and the message is not believed."""
    client = Client(_roster(), "boot-1")
    client.hello(0.0)
    client.roster = _roster()
    heard, refuse = client.say(Accept(lease="x"), 100.0)
    assert heard is None
    assert isinstance(refuse, Refuse)
    assert (refuse.boot, refuse.code, refuse.retry_s) == ("any", "session", 0.0)
    assert isinstance(client.hello(100.1), Welcome)
    assert client.say(Accept(lease="x"), 100.2)[0] == Accept(lease="x")


def test_words_of_the_session_before_are_dropped_quietly_for_a_while() -> None:
    """The same boot said hello again: what was under way then is old for 2 s, and a reason to ask after that."""
    roster = _roster()
    client = Client(roster, "boot-1")
    client.hello(0.0)
    client.say(Heartbeat(state="idle"), 0.1)
    old = client.seal(Accept(lease="x"))
    older = client.seal(Accept(lease="y"))
    client.hello(10.0)
    with pytest.raises(PayloadError, match="an old word"):
        roster.receive("a", old, 11.0)
    _, reply = roster.receive("a", older, 12.1)
    assert reply is not None
    assert isinstance(client.open(reply), Refuse)


def test_a_hello_that_is_repeated_gets_the_session_that_exists() -> None:
    """The answer was late. A device that has said something in the session counts anew after a hello: another one."""
    roster = _roster()
    client = Client(roster, "boot-1")
    first, again = client.hello(0.0), client.hello(11.0, free_bytes=6)
    assert isinstance(first, Welcome)
    assert isinstance(again, Welcome)
    assert (first.session, first.hello, again.hello) == (again.session, 1, 2)
    presence = roster.presence("a")
    assert presence is not None
    assert presence.free_bytes == 6
    assert client.say(Accept(lease="x"), 12.0)[0] == Accept(lease="x")
    third = client.hello(13.0)
    assert isinstance(third, Welcome)
    assert third.session != again.session
    assert client.say(Accept(lease="y"), 14.0)[0] == Accept(lease="y")


def test_messages_to_a_device_go_on_counting_in_a_session_that_it_keeps() -> None:
    """What was sent before the repeated hello cannot be sent again afterwards as something new."""
    roster = _roster()
    client = Client(roster, "boot-1")
    client.hello(0.0)
    roster.seal("a", Refuse(boot="x", code="y"))
    client.hello(11.0)
    sealed = roster.seal("a", Refuse(boot="x", code="y"))
    assert sealed is not None
    assert open_message(sealed, key=client.key, context=context_down("fed", "a")).seq == 2


def test_a_restarted_device_takes_over_its_name() -> None:
    """A new boot id; the old process is silent."""
    roster = _roster()
    Client(roster, "boot-1").hello(0.0)
    second = Client(roster, "boot-2")
    assert isinstance(second.hello(5.0), Welcome)
    assert second.say(Heartbeat(state="idle", free_bytes=7), 10.0)[0] is not None
    presence = roster.presence("a")
    assert presence is not None
    assert (presence.boot, presence.free_bytes) == ("boot-2", 7)


def test_of_two_clients_with_one_name_the_newer_is_refused_and_told() -> None:
    """The first speaks again 3 s after the second came: it keeps the name; a last word before that is not enough."""
    roster = _roster()
    first, second = Client(roster, "boot-1"), Client(roster, "boot-2")
    first.hello(0.0)
    second.hello(10.0)
    with pytest.raises(PayloadError, match="an old word"):
        first.say(Heartbeat(state="idle"), 12.9)
    _, refuse = first.say(Heartbeat(state="idle"), 13.0)
    assert isinstance(refuse, Refuse)
    assert (refuse.boot, refuse.code, refuse.retry_s) == ("boot-2", "duplicate_identity", 60.0)
    assert first.say(Accept(lease="x"), 13.1)[0] == Accept(lease="x")
    presence = roster.presence("a")
    assert presence is not None
    assert presence.boot == "boot-1"


def test_a_replayed_word_of_the_old_client_refuses_nobody() -> None:
    """Who records an old message and sends it again cannot throw the new client out."""
    roster = _roster()
    first, second = Client(roster, "boot-1"), Client(roster, "boot-2")
    first.hello(0.0)
    recorded = first.seal(Heartbeat(state="idle"))
    roster.receive("a", recorded, 1.0)
    second.hello(10.0)
    with pytest.raises(PayloadError, match="an old word"):
        roster.receive("a", recorded, 20.0)
    presence = roster.presence("a")
    assert presence is not None
    assert presence.boot == "boot-2"


def test_a_client_that_speaks_another_version_is_told_to_upgrade() -> None:
    """It asks again in an hour, and it is not present."""
    roster = _roster()
    refuse = Client(roster, "boot-1").hello(0.0, protocol=(2, 3))
    assert isinstance(refuse, Refuse)
    assert (refuse.code, refuse.retry_s) == ("upgrade_required", 3600.0)
    assert roster.presence("a") is None
    assert isinstance(Client(roster, "boot-1").hello(0.0, protocol=(1, 3)), Welcome)


def test_a_removed_device_is_gone_at_once() -> None:
    """No session, no message, no answer."""
    roster = _roster()
    client = Client(roster, "boot-1")
    client.hello(0.0)
    roster.set_devices([device_row("b")])
    assert roster.num_enrolled == 1
    assert roster.online(0.1) == frozenset()
    assert roster.seal("a", Refuse(boot="x", code="y")) is None
    with pytest.raises(PayloadError, match="unknown_device"):
        client.say(Accept(lease="x"), 0.2)


def test_messages_to_a_device_are_numbered_in_its_session() -> None:
    """1, 2, 3: so that the device takes each once."""
    roster = _roster()
    client = Client(roster, "boot-1")
    client.hello(0.0)
    numbers = []
    for _ in range(3):
        sealed = roster.seal("a", Refuse(boot="x", code="y"))
        assert sealed is not None
        opened = open_message(sealed, key=client.key, context=context_down("fed", "a"))
        assert opened.session == client.session
        numbers.append(opened.seq)
    assert numbers == [1, 2, 3]


def test_labels_given_at_the_coordinator_win_over_the_devices_own() -> None:
    """line: own a, given b; site: own only; floor: given only. Before the first hello only the given ones are known."""
    roster = Roster(
        "fed", [device_row("a", labels={"line": "b", "floor": "2"}), device_row("b")], epoch=9, heartbeat_s=1
    )
    assert roster.labels_of("a") == {"line": "b", "floor": "2"}
    Client(roster, "boot").hello(0.0, labels={"line": "a", "site": "x"})
    assert roster.labels_of("a") == {"line": "b", "floor": "2", "site": "x"}
    roster.set_devices([device_row("a"), device_row("b")])
    assert roster.labels_of("a") == {"line": "a", "site": "x"}
    assert roster.labels_of("b") == roster.labels_of("nobody") == {}


def test_a_device_tells_the_tasks_that_its_owner_allows() -> None:
    """Name and hash, as the hello has them."""
    roster = _roster()
    Client(roster, "boot").hello(0.0, tasks={"defects": "ab" * 32})
    present = roster.presence("a")
    assert present is not None
    assert present.tasks == {"defects": "ab" * 32}


def test_fresh_secrets_end_the_old_session() -> None:
    """What is sealed with the old key is not heard any more; the other device is not touched."""
    roster = _roster()
    old, other = Client(roster, "boot"), Client(roster, "boot", "b")
    old.hello(0.0)
    other.hello(0.0)
    roster.set_devices([device_row("a", key="12" * 32), device_row("b")])
    assert roster.presence("a") is None
    assert roster.online(0.0) == {"b"}
    with pytest.raises(PayloadError, match="the HMAC does not fit"):
        old.say(Heartbeat(state="idle"), 1.0)
