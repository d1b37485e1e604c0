"""What the coordinator publishes: sealed messages and chunks to devices, its state and announcements to everybody.

Nothing leaves before what the loop wrote for it is durable. Covers: sealing, publishing, counting the bytes of the open
run.
Does not cover: which message is due (`conductor`), which chunk comes next (`coordinator.fleet.downloads`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from coordinator.fleet.deployments import Deployments
from coordinator.fleet.roster import Roster
from coordinator.fleet.traffic import TrafficMeter
from edge_client import faults
from edge_client.transport.base import Transport
from edge_client.wire.chunks import peek_chunk
from edge_client.wire.messages import Deploy, Message
from edge_client.wire.topics import Topics

__all__ = ["ChunkSender", "Outbox"]


class Outbox:
    """The coordinator's side of the connection to the broker, as far as it speaks."""

    def __init__(
        self,
        transport: Transport,
        topics: Topics,
        roster: Roster,
        traffic: TrafficMeter,
        *,
        after_commit: Callable[[Callable[[], None]], None],
    ) -> None:
        """`after_commit` does something as soon as all that was written so far is durable (`Store.after_commit`)."""
        self._transport: Transport | None = transport
        self._after_commit = after_commit
        self._waiting_bytes = 0  # for a commit
        self._topics = topics
        self._roster = roster
        self._traffic = traffic

    def close(self) -> None:
        """Publish nothing from now on: whoever comes back later repeats what was lost."""
        self._transport = None

    @property
    def queued_bytes(self) -> int:
        """What was published and has not left this process yet."""
        return self._waiting_bytes + self._transport.queued_bytes if self._transport is not None else 0

    def send(self, device: str, message: Message) -> None:
        """Send a control message; it is lost if the device has no session, and repeated when it has one again."""
        sealed = self._roster.seal(device, message)
        if sealed is not None:
            is_counted = not isinstance(message, Deploy)
            self.publish(device, "cmd", sealed, is_counted=is_counted, fault=type(message).__name__.lower())

    def publish(self, device: str, channel: str, payload: bytes, *, is_counted: bool = True, fault: str = "") -> None:
        """Publish on a device's own topic; a device without a session costs the run nothing.

        Fault point: `coordinator.sent.<fault>`.
        """
        if is_counted and self._transport is not None and self._roster.presence(device) is not None:
            self._traffic.count(device, down=len(payload))
        self._publish(self._topics.device(device, channel), payload, fault=fault)

    def publish_shared(self, payload: bytes) -> None:
        """Publish on the topic that many devices read. Fault point: `coordinator.sent.chunk`."""
        self._publish(self._topics.shared_down, payload, fault="chunk")

    def announce(self, news: str) -> None:
        """Replace the retained announcement of the newest model."""
        self._publish(self._topics.announcement, news.encode(), retain=True)

    def announce_state(self, state: str) -> None:
        """Replace the retained state of the coordinator: online with its epoch, or offline."""
        self._publish(self._topics.coordinator_state, state.encode(), retain=True)

    def _publish(self, topic: str, payload: bytes, *, retain: bool = False, fault: str = "") -> None:
        self._waiting_bytes += len(payload)
        self._after_commit(partial(self._publish_now, topic, payload, retain, fault))

    def _publish_now(self, topic: str, payload: bytes, retain: bool, fault: str) -> None:
        self._waiting_bytes -= len(payload)
        if self._transport is None:
            return
        self._transport.publish(topic, payload, retain=retain)
        if fault:
            faults.point(f"coordinator.sent.{fault}")


class ChunkSender:
    """Sends chunks of blobs; those of deployed files are no part of a run's traffic."""

    def __init__(self, outbox: Outbox, deployments: Deployments, traffic: TrafficMeter) -> None:
        self._outbox = outbox
        self._deployments = deployments
        self._traffic = traffic

    def send(self, device: str, chunk: bytes) -> None:
        """Publish a chunk for one device."""
        self._outbox.publish(device, "down", chunk, is_counted=not self._is_deployed(chunk), fault="chunk")

    def share(self, devices: tuple[str, ...], chunk: bytes) -> None:
        """Publish a chunk once for all these devices; it counts for each of them."""
        for device in devices if not self._is_deployed(chunk) else ():
            self._traffic.count(device, down=len(chunk))
        self._outbox.publish_shared(chunk)

    def _is_deployed(self, chunk: bytes) -> bool:
        place = peek_chunk(chunk)
        return place is not None and self._deployments.is_chunk(place[0])
