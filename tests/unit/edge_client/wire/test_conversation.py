"""A device's side of the sealed exchange."""

from __future__ import annotations

import pytest

from edge_client.errors import PayloadError
from edge_client.records import DeviceProfile
from edge_client.wire.conversation import Conversation
from edge_client.wire.messages import (
    Accept,
    Cancel,
    Hello,
    Message,
    Welcome,
    context_down,
    context_up,
    open_message,
    seal_message,
)

KEY = bytes(range(32))
HELLO = Hello(boot="b", hello=1, profile=DeviceProfile(budget_bytes=1), labels={}, free_bytes=1)
WELCOME = Welcome(boot="b", hello=1, session="s1", epoch=1, heartbeat_s=10.0)


def talk() -> Conversation:
    """Device d of federation f."""
    return Conversation(federation="f", device="d", key=KEY)


def sent(message: Message, session: str, seq: int, key: bytes = KEY) -> bytes:
    """A message of the coordinator."""
    return seal_message(message, session=session, seq=seq, key=key, context=context_down("f", "d"))


def test_messages_are_counted_in_their_session_and_a_hello_belongs_to_none() -> None:
    """The second of session s1 has number 1; a hello says no session."""
    device = talk()
    device.begin("s1")
    device.seal(Accept(lease="l"))
    second = open_message(device.seal(Accept(lease="l")), key=KEY, context=context_up("f", "d"))
    assert (second.session, second.seq, second.message) == ("s1", 1, Accept(lease="l"))
    assert open_message(device.seal(HELLO), key=KEY, context=context_up("f", "d")).session == ""


def test_what_is_of_another_session_or_came_before_is_refused() -> None:
    """Each number once, in any order; a new session counts anew."""
    device = talk()
    assert device.open(sent(WELCOME, "", 0)) == WELCOME
    device.begin("s1")
    cancel = Cancel(lease="l")
    assert device.open(sent(cancel, "s1", 5)) == device.open(sent(cancel, "s1", 4)) == cancel
    for data, code in ((sent(cancel, "s1", 5), "replayed"), (sent(cancel, "s0", 6), "session")):
        with pytest.raises(PayloadError, match=code):
            device.open(data)
    device.begin("s2")
    assert device.open(sent(cancel, "s2", 5)) == cancel


def test_only_the_coordinator_can_have_said_it() -> None:
    """Another key, or a device's own message."""
    device = talk()
    for data in (sent(WELCOME, "", 0, key=bytes(32)), device.seal(HELLO)):
        with pytest.raises(PayloadError):
            device.open(data)
