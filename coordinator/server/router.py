"""What the devices publish, from topic and bytes to whoever handles the message.

Covers: topics, proof of the sender, sessions, counting what arrives, charging devices for what is dropped.
Does not cover: what a message means for the run (`conductor`), or for a deployment (`coordinator.fleet.deployments`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from coordinator.conductor.conductor import Conductor
from coordinator.fleet.deployments import Deployments
from coordinator.fleet.downloads import Downloads
from coordinator.fleet.roster import Roster
from coordinator.fleet.traffic import TrafficMeter
from coordinator.fleet.uploads import Uploads
from coordinator.server.outbox import Outbox
from edge_client.errors import PayloadError
from edge_client.logs import about
from edge_client.wire.messages import Accept, Decline, Deployed, Heartbeat, Hello, Message, Offer, Pull
from edge_client.wire.topics import Topics

__all__ = ["Router"]

log = logging.getLogger(__name__)


class Router:
    """Hands every publication of a device to the part that it concerns, or drops it."""

    def __init__(
        self,
        *,
        topics: Topics,
        roster: Roster,
        traffic: TrafficMeter,
        uploads: Uploads,
        downloads: Downloads,
        conductor: Conductor,
        deployments: Deployments,
        outbox: Outbox,
        tick_soon: Callable[[], None],
    ) -> None:
        """`tick_soon` makes the loop's next tick due soon: a device has arrived that may be asked for something."""
        self._topics = topics
        self._roster = roster
        self._traffic = traffic
        self._uploads = uploads
        self._downloads = downloads
        self._conductor = conductor
        self._deployments = deployments
        self._outbox = outbox
        self._tick_soon = tick_soon

    def receive(self, topic: str, payload: bytes, now: float) -> None:
        """Handle one publication; what is wrong with it is logged and charged to the device, never raised."""
        device = ""
        try:
            device, channel = self._topics.parse_device(topic)
            if self._roster.is_suspended(device, now):
                return
            if channel == "data":
                self._chunk(device, payload, now)
                return
            self._roster.charge_message(device, now)
            if channel == "state" and payload.startswith(b"offline "):
                self._roster.hint_gone(device, payload[8:72].decode("ascii", "replace"))
            elif channel == "up":
                self._message(device, payload, now)
        except PayloadError as error:
            num_dropped = self._roster.blame(device, len(payload), now)
            if num_dropped:
                level = logging.INFO if error.code == "unasked" else logging.WARNING  # late ones mean no harm
                text = "dropped %d messages, the last one on %r: %s"
                log.log(level, text, num_dropped, topic, error, extra=about(device=device))

    def _chunk(self, device: str, payload: bytes, now: float) -> None:
        if not self._roster.seen(device, now):
            raise PayloadError("session", f"a chunk of {device!r}, which has no session")
        self._traffic.count(device, up=len(payload))
        self._uploads.chunk(device, payload, now)

    def _message(self, device: str, payload: bytes, now: float) -> None:
        message, reply = self._roster.receive(device, payload, now)
        if self._roster.presence(device) is not None:
            self._traffic.count(device, up=len(payload))
        if reply is not None:
            self._outbox.publish(device, "cmd", reply, fault="welcome")
        if message is not None:
            self._dispatch(device, message, now)

    def _dispatch(self, device: str, message: Message, now: float) -> None:
        conductor = self._conductor
        match message:
            case Hello():
                log.info("%s is here (client %r)", device, message.client, extra=about(device=device))
                self._uploads.lost_connection(device)
                self._downloads.forget(device)
                conductor.greeted(device, message.boot, now)
                conductor.holding(device, message.held, finished=message.finished, now=now)
                self._deployments.greeted(device, now)
                self._tick_soon()
            case Heartbeat():
                if message.state != "fetching":
                    self._downloads.left(device)  # the message by which it left may have been lost
                conductor.holding(device, message.lease, finished=message.state == "offering", now=now)
            case Accept():
                conductor.accepted(device, message.lease, now)
            case Decline():
                conductor.declined(device, message, now)
            case Offer():
                conductor.offered(device, message, now)
            case Pull():
                self._pull(device, message, now)
            case Deployed():
                self._deployments.reported(device, message)
            case _:
                pass  # Goodbye: the roster knows

    def _pull(self, device: str, pull: Pull, now: float) -> None:
        length = self._conductor.may_pull(device, pull.sha256) or self._deployments.may_pull(device, pull.sha256)
        if length is None:
            self._downloads.left(device)
            return
        share = self._downloads.ask(device, pull.sha256, length, pull.ranges, heard=pull.heard, now=now)
        if share is not None:
            self._outbox.send(device, share)
