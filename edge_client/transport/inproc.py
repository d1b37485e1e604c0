"""The same transport in memory: a hub that behaves as a broker does, for tests and simulations.

Covers: topics with `+` and `#`, retained messages, wills, users with permissions, and a network that loses, repeats,
reorders and damages messages by a seed. A thousand clients of one hub cost no more than those that have to work.
Does not cover: threads, but for `wake`; everything happens inside `poll`.
"""

from __future__ import annotations

import random
import select
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_client.transport.base import Connected, Disconnected, Event, LossCode, OnEvent, Received, Will, check_message

__all__ = ["Faults", "Hub", "InprocTransport", "matches"]

Access = Callable[[str, Literal["publish", "subscribe"], str], bool]  # user, what, topic or filter -> allowed


def matches(pattern: str, topic: str) -> bool:
    """Whether a subscription covers a topic, by the rules of MQTT 3.1.1 (section 4.7)."""
    pattern_levels, levels = pattern.split("/"), topic.split("/")
    if topic.startswith("$") and pattern_levels[0] in ("+", "#"):
        return False
    for i, level in enumerate(pattern_levels):
        if level == "#":
            return True  # also the parent itself: `a/#` covers `a`
        if i >= len(levels) or level not in ("+", levels[i]):
            return False
    return len(pattern_levels) == len(levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How likely a delivery is lost, repeated, swapped with the one before it, or damaged in one bit."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0


class Hub:
    """A broker in memory."""

    def __init__(
        self,
        *,
        allowed: Access | None = None,
        faults: Faults | None = None,
        rng: random.Random | None = None,
        on_wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_wake` is called, from any thread, when a client's `wake` is: whoever calls `poll` may be waiting."""
        if faults is not None and rng is None:
            raise ValueError("faults need a seeded random.Random, so that a failure can be repeated")
        self._allowed = allowed or (lambda user, what, topic: True)
        self._faults = faults
        self._rng = rng
        self._on_wake = on_wake
        self._retained: dict[str, bytes] = {}
        self._listeners: dict[str, dict[InprocTransport, None]] = {}  # by exact topic; ordered sets
        self._wild_listeners: dict[str, dict[InprocTransport, None]] = {}  # by filter with + or #
        self._ready: dict[InprocTransport, None] = {}  # those that may have something to do

    def transport(self, name: str, on_event: OnEvent, *, will: Will | None = None) -> InprocTransport:
        """A new client of this hub, as user `name`."""
        return InprocTransport(self, name, on_event, will)

    @property
    def busy(self) -> bool:
        """Whether some client has something to do."""
        return any(member.busy for member in self._ready)

    def poll(self) -> None:
        """Let all clients work until nothing is left to do."""
        while self._ready:
            batch, self._ready = list(self._ready), {}
            for member in batch:
                member.poll(0.0)
                if member.busy:
                    self._ready[member] = None

    def _listen(self, member: InprocTransport, topic: str) -> None:
        self._index(topic).setdefault(topic, {})[member] = None

    def _unlisten(self, member: InprocTransport, topic: str) -> None:
        index = self._index(topic)
        index.get(topic, {}).pop(member, None)
        if not index.get(topic, True):
            del index[topic]

    def _index(self, topic: str) -> dict[str, dict[InprocTransport, None]]:
        return self._wild_listeners if "+" in topic or "#" in topic else self._listeners

    def _refused(self, user: str, topics: Sequence[str]) -> list[str]:
        return [topic for topic in topics if not self._allowed(user, "subscribe", topic)]

    def _retained_for(self, patterns: Sequence[str]) -> list[Received]:
        retained = self._retained.items()
        kept = [(t, p) for t, p in retained if any(matches(pattern, t) for pattern in patterns)]
        return [Received(topic=topic, payload=payload, retained=True) for topic, payload in kept]

    def _publish(self, user: str, topic: str, payload: bytes, retain: bool) -> None:
        if not self._allowed(user, "publish", topic):
            return
        if retain and payload:
            self._retained[topic] = payload
        elif retain:
            self._retained.pop(topic, None)
        subscribers = dict(self._listeners.get(topic, {}))
        for pattern, members in self._wild_listeners.items():
            if matches(pattern, topic):
                subscribers |= members
        for member in subscribers:
            self._deliver(member, Received(topic=topic, payload=payload))

    def _deliver(self, member: InprocTransport, message: Received) -> None:
        self._ready[member] = None
        if self._faults is None or self._rng is None:
            member._inbox.append(message)
            return
        faults, rng = self._faults, self._rng
        if rng.random() < faults.drop:
            return
        for _ in range(2 if rng.random() < faults.duplicate else 1):
            sent = _damaged(message, rng) if message.payload and rng.random() < faults.corrupt else message
            swap = bool(member._inbox) and isinstance(member._inbox[-1], Received) and rng.random() < faults.reorder
            member._inbox.insert(len(member._inbox) - swap, sent)


def _damaged(message: Received, rng: random.Random) -> Received:
    payload = bytearray(message.payload)
    payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    return Received(topic=message.topic, payload=bytes(payload), retained=message.retained)


class InprocTransport:
    """A `Transport` over a `Hub`; made by `Hub.transport`."""

    def __init__(self, hub: Hub, name: str, on_event: OnEvent, will: Will | None) -> None:
        self._hub = hub
        self._name = name
        self._on_event = on_event
        self._will = will
        self._topics: dict[str, None] = {}  # an ordered set
        self._asked: list[str] = []  # subscribed on this connection
        self._inbox: deque[Event] = deque()
        self._outbox: deque[tuple[str, bytes, bool]] = deque()
        self._wanted = self._connected = self._blocked = False

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that were published and are not yet with the hub."""
        return sum(len(payload) for _, payload, _ in self._outbox)

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do."""
        due = self._wanted and not self._blocked and (not self._connected or len(self._asked) < len(self._topics))
        return bool(self._inbox or self._outbox or due)

    def connect(self) -> None:
        """Connect at the next `poll`, and again after every loss until `close`."""
        self._wanted, self._blocked = True, False
        self._hub._ready[self] = None

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Queue a message; without a connection it is dropped."""
        check_message(topic, payload)
        if self._connected:
            self._outbox.append((topic, bytes(payload), retain))
            self._hub._ready[self] = None

    def subscribe(self, topics: Sequence[str]) -> None:
        """Ask for topics, now and again on every connection."""
        self._topics.update(dict.fromkeys(topics))
        self._hub._ready[self] = None

    def unsubscribe(self, topics: Sequence[str]) -> None:
        """Unsubscribe from these topics."""
        for topic in topics:
            self._topics.pop(topic, None)
            if topic in self._asked:
                self._asked.remove(topic)
                self._hub._unlisten(self, topic)

    def poll(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> list[int]:
        """Connect if due, hand over what is queued, deliver what came; never waits if there was something to do."""
        wait_ms = 0.0 if self.busy else max(0.0, timeout_s) * 1000
        self._connect_if_due()
        self._subscribe_if_due()
        while self._outbox:
            topic, payload, retain = self._outbox.popleft()
            self._hub._publish(self._name, topic, payload, retain)
        for _ in range(len(self._inbox)):
            if self._inbox:
                self._on_event(self._inbox.popleft())
        if not extra_fds:
            return []
        poller = select.poll()
        for fd in extra_fds:
            poller.register(fd, select.POLLIN)
        ready = dict(poller.poll(wait_ms))
        return [fd for fd in extra_fds if fd in ready]

    def wake(self) -> None:
        """Wake the caller of the hub's `poll`; this `poll` waits only for the caller's own descriptors."""
        self._hub._on_wake()

    def drop(self) -> None:
        """Lose the connection: the will is sent, and the next `poll` connects again."""
        if not self._connected:
            return
        self._lose("dropped on request", "network")
        if self._will is not None:
            self._hub._publish(self._name, self._will.topic, self._will.payload, self._will.retain)

    def close(self) -> None:
        """Hand over what is queued, say goodbye, end."""
        while self._outbox:
            self._hub._publish(self._name, *self._outbox.popleft())
        self._wanted = self._connected = False
        self._inbox.clear()
        self._forget_subscriptions()
        self._hub._ready.pop(self, None)

    def _connect_if_due(self) -> None:
        if self._wanted and not self._connected and not self._blocked:
            self._forget_subscriptions()
            if not self._refuse(list(self._topics)):
                self._connected = True
                self._inbox.append(Connected())

    def _subscribe_if_due(self) -> None:
        topics = [topic for topic in self._topics if topic not in self._asked]
        if self._connected and topics and not self._refuse(topics):
            self._asked.extend(topics)
            for topic in topics:
                self._hub._listen(self, topic)
            self._inbox.extend(self._hub._retained_for(topics))

    def _refuse(self, topics: Sequence[str]) -> bool:
        refused = self._hub._refused(self._name, topics)
        if refused:
            self._blocked = True  # until the next `connect`: a loop in memory has no slow retries
            self._lose(f"the hub refused to deliver {', '.join(refused)}", "subscription")
        return bool(refused)

    def _forget_subscriptions(self) -> None:
        for topic in self._asked:
            self._hub._unlisten(self, topic)
        self._asked.clear()

    def _lose(self, reason: str, code: LossCode) -> None:
        self._connected = False
        self._forget_subscriptions()
        self._inbox.clear()
        self._outbox.clear()
        self._inbox.append(Disconnected(reason=reason, code=code))
        self._hub._ready[self] = None
