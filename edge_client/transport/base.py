"""The contract of a transport: it carries small messages on topics, in order and at most once.

    Connected       all subscriptions are acknowledged; what is published from now on goes out
    Received        a message; never before `Connected`
    Disconnected    the connection ended, or an attempt failed; the transport tries again by itself, for ever

Every connection gives `Connected Received* Disconnected`, a failed attempt only `Disconnected`. Nothing survives a
disconnection: messages that were not written are dropped, and so is what is published before the next `Connected`.
Loss is healed above (acknowledgements, hello), because a broker's acknowledgement is not a receipt.

Covers: the contract, its records, the broker's address as people write it. Does not cover: topics (`wire.topics`).
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from edge_client.errors import InputError

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "BrokerUrl",
    "Connected",
    "Disconnected",
    "Event",
    "LossCode",
    "OnEvent",
    "Received",
    "Transport",
    "Will",
    "check_message",
    "parse_broker_url",
]

MAX_PAYLOAD_BYTES = 131_072  # the smallest limit of the brokers we know (AWS IoT Core); more costs the connection

# network: unreachable or lost; credentials: user or password; refused: the broker or its certificate is not acceptable;
# subscription: a topic was refused, so this connection could never hear what it must hear
LossCode = Literal["network", "credentials", "refused", "subscription"]


@dataclass(frozen=True, slots=True)
class Connected:
    """Messages flow both ways now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """No connection; `reason` is for people."""

    reason: str
    code: LossCode = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message from the broker, which is trusted for nothing but delivery.

    `retained`: the broker kept it for those who subscribe later; it says nothing about this moment.
    """

    topic: str
    payload: bytes
    retained: bool = False


Event = Connected | Disconnected | Received
OnEvent = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Will:
    """The message that the broker publishes for us when the connection ends without a goodbye."""

    topic: str
    payload: bytes
    retain: bool = True


class Transport(Protocol):
    """One connection; events come from inside `poll`, one at a time, on the `on_event` given at construction."""

    def connect(self) -> None:
        """Begin to connect, and keep connected until `close`; returns at once."""

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Queue a message (see `check_message`); never waits for the network; from any thread."""

    def subscribe(self, topics: Sequence[str]) -> None:
        """Ask for topics, now and again on every connection; from any thread."""

    def unsubscribe(self, topics: Sequence[str]) -> None:
        """Unsubscribe, before anything that is published from now on; some messages may still arrive."""

    def poll(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> list[int]:
        """Wait at most `timeout_s` (it may be less), do the work that is due, return the readable `extra_fds`."""

    def wake(self) -> None:
        """Make a waiting `poll` return; from any thread."""

    def drop(self) -> None:
        """Give up this connection without a goodbye (the will is sent) and connect again; from any thread."""

    def close(self) -> None:
        """Write the queue, say goodbye, and end; not from inside an event."""

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that were published and are not yet written to the network."""


def check_message(topic: str, payload: bytes) -> None:
    """Raise `ValueError` for a message that not every broker carries: a bug of the caller."""
    if not topic or "+" in topic or "#" in topic:
        raise ValueError(f"expected a topic without wildcards, got {topic!r}")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"message of {len(payload)} bytes for {topic!r}; at most {MAX_PAYLOAD_BYTES} travel in one")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerUrl:
    """Where a broker listens."""

    host: str
    port: int
    tls: bool
    username: str | None = None
    password: str | None = None


def parse_broker_url(text: str) -> BrokerUrl:
    """`mqtt[s]://[user:password@]host[:port]`; without a port 1883, with TLS 8883."""
    try:
        parts = urllib.parse.urlsplit(text)
    except ValueError as error:
        raise InputError(f"expected a broker such as mqtts://broker.example:8883, got a broken one ({error})") from None
    try:
        port = parts.port
    except ValueError:
        port = 0
    rest = parts.path.strip("/") or parts.query or parts.fragment
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname or rest or port == 0:
        shown = text.replace(f":{parts.password}@", ":***@") if parts.password else text
        raise InputError(f"expected a broker such as mqtts://broker.example:8883 or mqtt://127.0.0.1, got {shown!r}")
    tls = parts.scheme == "mqtts"
    return BrokerUrl(
        host=parts.hostname,
        port=port or (8883 if tls else 1883),
        tls=tls,
        username=urllib.parse.unquote(parts.username) if parts.username else None,
        password=urllib.parse.unquote(parts.password) if parts.password else None,
    )
