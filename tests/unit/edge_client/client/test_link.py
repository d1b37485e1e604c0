"""Messages between a device and its coordinator, as both shells send and receive them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from device_world import KEY
from rows import PROFILE

from edge_client.client.link import CoordinatorLink
from edge_client.errors import PayloadError
from edge_client.transport.base import Event, Received
from edge_client.transport.inproc import Hub
from edge_client.wire.messages import Cancel, Goodbye, Hello, context_down, context_up, open_message, seal_message
from edge_client.wire.topics import Topics

TOPICS = Topics("fed")
HELLO = Hello(boot="b", hello=1, client="", profile=PROFILE, labels={}, free_bytes=1, held=None, finished=False)


@pytest.fixture
def heard() -> list[Event]:
    """What the coordinator hears."""
    return []


@pytest.fixture
def hub(heard: list[Event]) -> Hub:
    """With a coordinator on it."""
    hub = Hub()
    coordinator = hub.transport("coordinator", heard.append)
    coordinator.subscribe((TOPICS.device("d", "up"),))
    coordinator.connect()
    hub.poll()
    heard.clear()
    return hub


@pytest.fixture
def link(hub: Hub) -> CoordinatorLink:
    """Of device d, which allows one task."""
    transport = hub.transport("d", lambda event: None)
    transport.connect()
    hub.poll()
    return CoordinatorLink(
        device="d",
        topics=TOPICS,
        key=bytes.fromhex(KEY),
        transport=transport,
        complete_hello=lambda hello: replace(hello, tasks={"defects": "a" * 64}),
    )


def test_hellos_are_completed_before_they_are_sent(link: CoordinatorLink, hub: Hub, heard: list[Event]) -> None:
    """A hello belongs to no session yet, a goodbye to the one that was begun."""
    link.send(HELLO)
    link.begin_session("s")
    link.send(Goodbye())
    hub.poll()
    sealed = [
        open_message(event.payload, key=bytes.fromhex(KEY), context=context_up("fed", "d"))
        for event in heard
        if isinstance(event, Received)
    ]
    assert [(one.session, one.message) for one in sealed] == [
        ("", replace(HELLO, tasks={"defects": "a" * 64})),
        ("s", Goodbye()),
    ]


def test_only_the_topic_of_messages_is_opened(link: CoordinatorLink) -> None:
    """Something else on another topic is none; a message of another session is refused."""
    sealed = [
        seal_message(
            Cancel(lease="l"), session=session, seq=1, key=bytes.fromhex(KEY), context=context_down("fed", "d")
        )
        for session in ("s", "t")
    ]
    link.begin_session("s")
    assert link.receive(TOPICS.device("d", "down"), sealed[0]) is None
    assert link.receive(TOPICS.device("d", "cmd"), sealed[0]) == Cancel(lease="l")
    with pytest.raises(PayloadError, match="another session"):
        link.receive(TOPICS.device("d", "cmd"), sealed[1])
