"""The sealed messages between a device and its coordinator, over whatever transport connects the two.

Used by the daemon and by every device of a simulation. Does not cover: what messages mean (`session`), chunks
(`transfers`).
"""

from __future__ import annotations

from collections.abc import Callable

from edge_client import faults
from edge_client.transport.base import Transport
from edge_client.wire.conversation import Conversation
from edge_client.wire.messages import Hello, Message
from edge_client.wire.topics import Topics

__all__ = ["CoordinatorLink"]


class CoordinatorLink:
    """The message channel between one device and its coordinator."""

    def __init__(
        self,
        *,
        device: str,
        topics: Topics,
        key: bytes,
        transport: Transport,
        complete_hello: Callable[[Hello], Hello],
    ) -> None:
        """`complete_hello` adds the fields of a hello that the session does not know."""
        self._up_topic, self._down_topic = topics.device(device, "up"), topics.device(device, "cmd")
        self._conversation = Conversation(federation=topics.federation, device=device, key=key)
        self._transport = transport
        self._complete_hello = complete_hello

    def begin_session(self, session: str) -> None:
        """From now on messages belong to this session."""
        self._conversation.begin(session)

    def send(self, message: Message) -> None:
        """Send a message; it is lost without a connection."""
        if isinstance(message, Hello):
            message = self._complete_hello(message)
        self._transport.publish(self._up_topic, self._conversation.seal(message))
        faults.point(f"daemon.sent.{type(message).__name__.lower()}")

    def receive(self, topic: str, payload: bytes) -> Message | None:
        """The message that arrived on a topic; None if the topic carries no messages. Raises `PayloadError`."""
        return self._conversation.open(payload) if topic == self._down_topic else None
