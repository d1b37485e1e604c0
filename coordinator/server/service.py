"""The coordinator process: one loop over the broker's connection, the aggregator, and the people who ask.

Covers: starting and recovering, presence, messages and chunks both ways, supervising the broker, shutting down.
Does not cover: deciding (`rounds`), carrying out (`conductor`), answering people (`requests`). Never imports torch.

A full disk makes it start over from what is stored, as after a crash, until there is space; nothing acknowledged is
lost, because nothing is acknowledged before it is stored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import secrets
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.aggregation.job_child import JobChild, aggregator
from coordinator.broker.broker import DeviceAccess, EmbeddedBroker
from coordinator.conductor.conductor import Conductor
from coordinator.control import Answer, ControlServer
from coordinator.fleet.deployments import Deployments
from coordinator.fleet.roster import Roster
from coordinator.fleet.transfers import Arrived, Downloads, Uploads
from coordinator.store import snapshot
from coordinator.store.base import Store
from coordinator.store.rows import DeviceRow
from edge_client import durable, faults
from edge_client.client.supervisor import Supervisor
from edge_client.errors import DiskFullError, FedfitError, MachineError, NetworkError, PayloadError
from edge_client.logs import about
from edge_client.transport.base import Connected, Disconnected, Event, Received, Transport
from edge_client.transport.blobs import BlobStore
from edge_client.wire.chunks import peek_chunk
from edge_client.wire.messages import (
    Accept,
    Decline,
    Deploy,
    Deployed,
    Heartbeat,
    Hello,
    Message,
    Offer,
    Pull,
    Refuse,
)
from edge_client.wire.topics import Topics

__all__ = [
    "Service",
    "ServiceOptions",
    "access_of",
    "allow_many_files",
]

log = logging.getLogger(__name__)

_TICK_S = 0.25
_BUSY_S = 0.002
_SUSPEND_AGAIN_S = 10.0
_DISK_RETRY_S = 1.0
_LONGEST_DISK_RETRY_S = 60.0


def allow_many_files() -> None:
    """As many as this process may have open: every upload under way has two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def access_of(device: DeviceRow, topics: Topics) -> DeviceAccess:
    """What a device may do at the broker: exactly its own topics."""
    return DeviceAccess(
        name=device.name,
        password=device.password,
        publish=topics.device_publishes(device.name),
        subscribe=topics.device_may_subscribe(device.name),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How a coordinator runs."""

    heartbeat_s: float = 10.0
    disk_reserve_bytes: int = 1 << 30  # below this no update is asked for: the run pauses
    simulated: bool = False  # all devices are virtual: nobody drops out, nothing has a deadline
    test_data: str = ""  # the npz file that `evaluate.on = "simulate"` means


class Service:
    """A coordinator on a state directory that this process has locked."""

    def __init__(
        self,
        *,
        state_dir: Path,
        store: Store,
        broker: EmbeddedBroker | None,
        brokers: tuple[str, ...],
        ca: str | None,
        connect: Callable[[Callable[[Event], None]], Transport],
        options: ServiceOptions,
        aggregation: JobChild | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """`brokers` and `ca` go into the bundles; `connect` makes the coordinator's own connection.

        `aggregation` is an aggregator that outlives this service; without it the service has its own. `supervisor` is
        told of every turn of the loop.
        """
        self.state_dir = state_dir
        self.store = store
        self._broker = broker
        self.brokers = brokers
        self.ca = ca
        self._connect = connect
        self._options = options
        self.federation = store.settings.federation(secrets.token_hex(6))
        self.topics = Topics(self.federation)
        self.blobs = BlobStore(state_dir / "blobs", state_dir / "tmp")
        self._aggregation = aggregation or aggregator()
        self._supervisor = supervisor or Supervisor()
        self.observers: list[Callable[[Service, float], None]] = []  # called from the loop, several times a second
        self._stopping = self._begun = self._was_connected = self.connected = False
        self.paused = ""
        self._transport: Transport | None = None
        self._arrivals: deque[Arrived] = deque()
        self._suspended: frozenset[str] = frozenset()  # devices that the broker does not let in
        self._suspend_at = 0.0

    def request_stop(self, *_: object) -> None:
        """End the loop soon; safe in a signal handler."""
        self._stopping = True
        if self._transport is not None:
            self._transport.wake()

    def run(self, answer: Answer) -> None:
        """Serve until SIGTERM or SIGINT; `answer` handles the requests that reach the control socket."""
        signal.signal(signal.SIGTERM, self.request_stop)
        signal.signal(signal.SIGINT, self.request_stop)
        allow_many_files()
        retry_s, before = _DISK_RETRY_S, ""  # the same write fails again: wait longer
        control = ControlServer(self.state_dir, answer)
        try:
            while not self._stopping:
                try:
                    self._serve(control)
                except DiskFullError as error:
                    retry_s = min(2 * retry_s, _LONGEST_DISK_RETRY_S) if str(error) == before else _DISK_RETRY_S
                    before = str(error)
                    self.paused = f"disk_full: {error}"
                    log.error("disk_full: %s; the run pauses, trying again in %.0f s", error, retry_s)
                    self._wait_for_space(control, retry_s)
        finally:
            control.close()
            self.close()

    def in_hand(self) -> tuple[str, int]:
        """The run and the round that are open; empty and 0 if none is."""
        machine = self.conductor.machine if self._begun else None
        return (machine.run, machine.number) if machine is not None else ("", 0)

    def close(self) -> None:
        """End the aggregator."""
        self._aggregation.close()

    def _wait_for_space(self, control: ControlServer, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < until:
            self._supervisor.alive(time.monotonic())
            poller = select.poll()
            for fd in control.fds() if self._begun else ():  # before the first start there is nothing to answer with
                poller.register(fd, select.POLLIN)
            control.serve([fd for fd, _ in poller.poll(100)])

    def _serve(self, control: ControlServer) -> None:
        """From recovery to the end, or to a full disk."""
        with contextlib.ExitStack() as opened:
            transport = self.begin(opened)
            self._supervisor.ready()
            while not self._stopping:
                self._turn(control)
            self._supervisor.stopping()
            self.conductor.save_traffic()
            transport.publish(self.topics.coordinator_state, b"offline", retain=True)

    def begin(self, opened: contextlib.ExitStack) -> Transport:
        """Recover and connect; what was `opened` is closed even if this fails half-way."""
        now = time.monotonic()
        snapshot.drop_stale(self.state_dir)
        self.epoch = self.store.settings.next_epoch(int(time.time()))
        devices = self.store.devices.all()
        self.roster = Roster(self.federation, devices, epoch=self.epoch, heartbeat_s=self._options.heartbeat_s)
        self._suspended = frozenset()
        self._let_in(devices)
        self._arrivals.clear()
        opened.callback(self._aggregation.forget_jobs)
        self._transport = transport = self._connect(self._on_event)
        opened.callback(self._let_go)
        transport.subscribe(self.topics.coordinator_subscribes())
        self.uploads = Uploads(self.blobs, arrived=self._from_thread, steady=self._options.simulated)
        opened.callback(self.uploads.close)
        self.downloads = Downloads(self.blobs, shares=not self._options.simulated)
        opened.callback(self.downloads.close)
        self.conductor = Conductor(
            store=self.store,
            blobs=self.blobs,
            uploads=self.uploads,
            downloads=self.downloads,
            aggregation=self._aggregation,
            send=self.send,
            announce=self._announce,
            roster=self.roster,
            epoch=self.epoch,
            simulated=self._options.simulated,
            test_data=self._options.test_data,
            own_models=self.state_dir / "devices" if self._options.simulated else None,
        )
        self.conductor.recover(now)
        self.deployments = Deployments(
            store=self.store, blobs=self.blobs, roster=self.roster, send=self.send, release=self.conductor.release
        )
        self._tick_at = now
        self._begun, self.paused = True, ""
        transport.connect()
        return transport

    def _let_go(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _from_thread(self, arrived: Arrived) -> None:
        self._arrivals.append(arrived)
        if self._transport is not None:
            self._transport.wake()

    # the loop

    def _turn(self, control: ControlServer) -> None:
        assert self._transport is not None
        ready = self._transport.poll(self.wait_s(), [*control.fds(), *self.fds()])
        control.serve(ready)
        self.attend(ready)
        self._supervisor.alive(time.monotonic())

    def fds(self) -> list[int]:
        """What to watch beside the connection and the people who ask."""
        return [self._aggregation.fd] if self._aggregation.fd is not None else []

    def wait_s(self) -> float:
        """How long there is nothing to do, unless something comes."""
        if self._arrivals:
            return 0.0
        return _BUSY_S if self.downloads.busy else max(0.0, self._tick_at - time.monotonic())

    def attend(self, ready: Sequence[int]) -> None:
        """Do what is due; `ready` are the readable ones of `fds`."""
        now = time.monotonic()
        if self._aggregation.fd in ready:
            self._aggregation.read(now)
            if self.conductor.selecting:  # a round has ended: begin the next one now, not at the next tick
                self._tick_at = now
        while self._arrivals:
            arrived = self._arrivals.popleft()
            if self.uploads.settle(arrived):
                self.conductor.arrived(arrived, now)
        if now >= self._tick_at:
            self._tick(now)
        self._grant(now)
        self.downloads.send(self._queued, self._send_chunk, self._share_chunk, now)

    def _queued(self) -> int:
        return self._transport.queued_bytes if self._transport else 0

    def _tick(self, now: float) -> None:
        self._tick_at = now + _TICK_S
        if self._broker is not None:
            self._broker.ensure()
        if now >= self._suspend_at:
            self._suspend(now)
        self._aggregation.tick(now)
        online = self.roster.online(now)
        for device, share in self.downloads.tick(online, now):
            self.send(device, share)
        self.conductor.tick(online, self.roster.num_enrolled, now)
        self.deployments.tick(online, now)
        run, number = self.in_hand()
        work = f"; run {run}, round {number}" if run else ""
        for observe in self.observers:
            observe(self, now)
        self._supervisor.doing(f"{len(online)} of {self.roster.num_enrolled} devices online{work}")

    def _suspend(self, now: float) -> None:
        """The broker cuts those who flood us, and lets them in again."""
        before, self._suspended = self._suspended, self.roster.suspended(now)
        if before == self._suspended:
            return
        for name in sorted(before ^ self._suspended):
            what = "suspended: flooding" if name in self._suspended else "let in again"
            log.warning("%s is %s", name, what, extra=about(device=name))
        try:
            self._let_in(self.store.devices.all())
        except DiskFullError:
            raise
        except MachineError as error:  # a broker under a flood may be slow; nothing they say is heard anyway
            self._suspended, self._suspend_at = before, now + _SUSPEND_AGAIN_S
            log.error("%s", error)

    def _grant(self, now: float) -> None:
        with durable.disk_errors(f"cannot look at {self.state_dir}"):
            free = durable.free_bytes(self.state_dir) - self.uploads.outstanding_bytes
        low = free < self._options.disk_reserve_bytes
        if low != bool(self.paused):
            self.paused = "disk: less than the reserve is free, no update is asked for" if low else ""
            log.warning(self.paused or "there is space on the disk again")
        if not low:
            for device, grant in self.uploads.grants(now):
                self.send(device, grant)

    # what the broker brings

    def _on_event(self, event: Event) -> None:
        match event:
            case Connected():
                log.info("connected to the broker")
                self._was_connected = self.connected = True
                assert self._transport is not None
                online = f"online {self.epoch}".encode()
                self._transport.publish(self.topics.coordinator_state, online, retain=True)
            case Disconnected():
                if self._broker is None and not self._was_connected:  # somebody else's, and just typed: tell who did
                    raise NetworkError(f"cannot use the broker {', '.join(self.brokers)}: {event.reason}")
                self.connected = False
                log.warning("not connected (%s): %s", event.code, event.reason)
                self.uploads.lost_connection()
                self.downloads.lost_connection()
            case Received():
                self._received(event.topic, event.payload, time.monotonic())

    def _received(self, topic: str, payload: bytes, now: float) -> None:
        device = ""
        try:
            device, channel = self.topics.parse_device(topic)
            if self.roster.is_suspended(device, now):
                return
            if channel == "data":
                self._chunk(device, payload, now)
                return
            self.roster.spoke(device, now)
            if channel == "state" and payload.startswith(b"offline "):
                self.roster.hint_gone(device, payload[8:72].decode("ascii", "replace"))
            elif channel == "up":
                self._message(device, payload, now)
        except PayloadError as error:
            count = self.roster.blame(device, len(payload), now)
            if count:
                level = logging.INFO if error.code == "unasked" else logging.WARNING  # some come late, and mean no harm
                what = "dropped %d messages, the last one on %r: %s"
                log.log(level, what, count, topic, error, extra=about(device=device))

    def _chunk(self, device: str, payload: bytes, now: float) -> None:
        if not self.roster.seen(device, now):
            raise PayloadError("session", f"a chunk of {device!r}, which has no session")
        self.conductor.count(device, up=len(payload))
        self.uploads.chunk(device, payload, now)

    def _message(self, device: str, payload: bytes, now: float) -> None:
        message, reply = self.roster.receive(device, payload, now)
        if self.roster.presence(device) is not None:
            self.conductor.count(device, up=len(payload))
        if reply is not None:
            self._publish(device, "cmd", reply)
            faults.point("coordinator.sent.welcome")
        if message is not None:
            self._said(device, message, now)

    def _said(self, device: str, message: Message, now: float) -> None:
        conductor = self.conductor
        match message:
            case Hello():
                log.info("%s is here (client %r)", device, message.client, extra=about(device=device))
                self.uploads.lost_connection(device)
                self.downloads.forget(device)
                conductor.greeted(device, message.boot, now)
                conductor.holding(device, message.held, finished=message.finished, now=now)
                self.deployments.greeted(device, now)
                self._tick_at = now
            case Heartbeat():
                if message.state != "fetching":
                    self.downloads.left(device)  # its word that it left may have been lost
                conductor.holding(device, message.lease, finished=message.state == "offering", now=now)
            case Accept():
                conductor.accepted(device, message.lease, now)
            case Decline():
                conductor.declined(device, message, now)
            case Offer():
                conductor.offered(device, message, now)
            case Pull():
                self._pulled(device, message, now)
            case Deployed():
                self.deployments.told(device, message)
            case _:
                pass  # Goodbye: the roster knows

    def _pulled(self, device: str, pull: Pull, now: float) -> None:
        length = self.conductor.may_pull(device, pull.sha256) or self.deployments.may_pull(device, pull.sha256)
        if length is None:
            self.downloads.left(device)
            return
        share = self.downloads.ask(device, pull.sha256, length, pull.ranges, heard=pull.heard, now=now)
        if share is not None:
            self.send(device, share)

    # what goes out

    def send(self, device: str, message: Message) -> None:
        """A control message to a device; lost if it is not there, and said again when it is."""
        sealed = self.roster.seal(device, message)
        if sealed is not None:
            self._publish(device, "cmd", sealed, is_counted=not isinstance(message, Deploy))
            faults.point(f"coordinator.sent.{type(message).__name__.lower()}")

    def _send_chunk(self, device: str, payload: bytes) -> None:
        self._publish(device, "down", payload, is_counted=not self._is_deployed(payload))
        faults.point("coordinator.sent.chunk")

    def _share_chunk(self, devices: tuple[str, ...], payload: bytes) -> None:
        """One publication that each of the devices gets."""
        if self._transport is not None:
            for device in devices if not self._is_deployed(payload) else ():
                self.conductor.count(device, down=len(payload))
            self._transport.publish(self.topics.shared_down, payload)
        faults.point("coordinator.sent.chunk")

    def _is_deployed(self, chunk: bytes) -> bool:
        place = peek_chunk(chunk)
        return place is not None and self.deployments.is_chunk(place[0])

    def _publish(self, device: str, channel: str, payload: bytes, *, is_counted: bool = True) -> None:
        if self._transport is not None:
            if is_counted and self.roster.presence(device) is not None:
                self.conductor.count(device, down=len(payload))
            self._transport.publish(self.topics.device(device, channel), payload)

    def _announce(self, what: dict[str, object]) -> None:
        if self._transport is not None:
            self._transport.publish(self.topics.announcement, json.dumps(what).encode(), retain=True)

    @property
    def test_data(self) -> str:
        """The npz file that `evaluate.on = "simulate"` means; empty outside of simulations."""
        return self._options.test_data

    @property
    def broker_is_external(self) -> bool:
        """Whether somebody else keeps the broker's users."""
        return self._broker is None

    def add_devices(self, rows: list[DeviceRow], *, replace: bool = False) -> None:
        """Enrol devices, or give enrolled ones new secrets: all, or none and an error."""
        before = self.store.devices.all()
        names = {row.name for row in rows}
        others = [device for device in before if not (replace and device.name in names)]
        self._let_in([*others, *rows])  # first: an account that nobody knows harms less than a device without one
        try:
            self.store.devices.add(*rows, replace=replace)
        except FedfitError:
            with contextlib.suppress(MachineError):
                self._let_in(before)
            raise
        self.roster.set_devices(self.store.devices.all())
        for name in names if replace else ():
            self.uploads.lost_connection(name)
            self.downloads.forget(name)

    def set_labels(self, name: str, labels: Mapping[str, str]) -> None:
        """Replace the labels that are given here to a device."""
        self.store.devices.set_labels(name, labels)
        self.roster.set_devices(self.store.devices.all())

    def take_snapshot(self) -> None:
        """What a backup is made of, as things stand between two events."""
        self.conductor.save_traffic()
        snapshot.make(self.store, self.state_dir)

    def _let_in(self, devices: Iterable[DeviceRow]) -> None:
        if self._broker is not None:
            allowed = [device for device in devices if device.name not in self._suspended]
            self._broker.set_devices(access_of(device, self.topics) for device in allowed)

    def remove_devices(self, names: Sequence[str]) -> None:
        """Forget devices: their leases end, and the broker cuts them and nobody else."""
        for name in names:
            self._dismiss(name)
            self.store.devices.remove(name)
        devices = self.store.devices.all()
        self.roster.set_devices(devices)
        for name in names:
            self.downloads.forget(name)
            self.conductor.removed(name, time.monotonic())
            self.deployments.removed(name)
        self._let_in(devices)

    def _dismiss(self, name: str) -> None:
        """Tell a device that it is removed: the embedded broker will say so, another one may let it in for years."""
        present = self.roster.presence(name)
        if self._broker is None and present is not None:
            detail = "this device was removed from the federation; join again with a new bundle"
            self.send(name, Refuse(boot=present.boot, code="removed", detail=detail, retry_s=3600.0))
