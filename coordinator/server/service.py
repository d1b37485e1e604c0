"""The coordinator process: one loop over the broker's connection, the aggregator, and the people who ask.

Covers: starting and recovering, the order of work in a turn of the loop, the state of the connection, shutting down.
Does not cover: what devices publish (`router`), what is published to them (`outbox`), deciding (`rounds`), carrying out
(`conductor`), answering people (`requests`). Never imports torch.

A turn of the loop is one durable commit (`store.turn`). A full disk makes it start over from what is stored, as after a
crash, until there is space; nothing acknowledged is lost, because nothing is acknowledged before it is stored.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import secrets
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coordinator.aggregation.job_child import JobChild, aggregator
from coordinator.broker.broker import EmbeddedBroker
from coordinator.conductor.commits import ANNOUNCEMENT
from coordinator.conductor.conductor import Conductor
from coordinator.control import Answer, ControlServer
from coordinator.fleet.deployments import Deployments
from coordinator.fleet.downloads import Downloads
from coordinator.fleet.roster import Roster
from coordinator.fleet.traffic import TrafficMeter
from coordinator.fleet.uploads import FinishedUpload, Uploads
from coordinator.server.broker_accounts import BrokerAccounts
from coordinator.server.enrolment import Enrolment
from coordinator.server.outbox import ChunkSender, Outbox
from coordinator.server.picture import Pictures
from coordinator.server.router import Router
from coordinator.server.upload_grants import UploadGrants
from coordinator.store import snapshot
from coordinator.store.base import Store
from edge_client.client.supervisor import Supervisor
from edge_client.errors import DiskFullError, NetworkError
from edge_client.transport.base import Connected, Disconnected, Event, Received, Transport
from edge_client.transport.blobs import BlobStore
from edge_client.wire.topics import Topics

__all__ = ["Guest", "Service", "ServiceOptions", "allow_many_files"]

log = logging.getLogger(__name__)

_TICK_S = 0.25
_SHORTEST_TICK_S = 0.05  # a tick looks at all devices: many that arrive at once share one
_BUSY_S = 0.002
_DISK_RETRY_S = 1.0
_LONGEST_DISK_RETRY_S = 60.0


def allow_many_files() -> None:
    """Open as many files as this process may: every upload under way has two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How a coordinator runs."""

    heartbeat_s: float = 10.0
    disk_reserve_bytes: int = 1 << 30  # below this no update is asked for: the run pauses
    simulated: bool = False  # all devices are virtual: nobody drops out, nothing has a deadline
    test_data: str = ""  # the npz file that `evaluate.on = "simulate"` means


class Guest(Protocol):
    """Somebody else who has file descriptors to watch and something to do in each turn of the loop."""

    def fds(self) -> list[int]:
        """What to watch."""

    def attend(self, ready: Sequence[int], now: float) -> None:
        """Do what is due; `ready` are readable file descriptors, of whomever."""

    def close(self) -> None:
        """The coordinator ends."""


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

        `aggregation` is an aggregator that outlives this service; without it the service starts one. `supervisor` hears
        of every turn of the loop.
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
        self.pictures = Pictures()
        self.guests: list[Guest] = []
        self.observers: list[Callable[[Service, float], None]] = []  # called from the loop, several times a second
        self._stopping = self._begun = self._was_connected = self.connected = False
        self._disk_problem = ""
        self._transport: Transport | None = None
        self._arrivals: deque[FinishedUpload] = deque()

    @property
    def is_supervised(self) -> bool:
        """Whether a service manager started this process, and would start it again."""
        return self._supervisor.is_there

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
        retry_s, last_problem = _DISK_RETRY_S, ""  # the same write fails again: wait longer
        control = ControlServer(self.state_dir, answer)
        try:
            while not self._stopping:
                try:
                    self._serve(control)
                except DiskFullError as error:
                    retry_s = min(2 * retry_s, _LONGEST_DISK_RETRY_S) if str(error) == last_problem else _DISK_RETRY_S
                    last_problem = str(error)
                    self._disk_problem = f"disk_full: {error}"
                    log.error("disk_full: %s; the run pauses, trying again in %.0f s", error, retry_s)
                    self._wait_for_space(control, retry_s)
        finally:
            control.close()
            self.close()

    def close(self) -> None:
        """End the aggregator, and let the guests go."""
        for guest in self.guests:
            guest.close()
        self._aggregation.close()

    def wake(self) -> None:
        """Make the loop turn soon; any thread may call this."""
        transport = self._transport
        if transport is not None:
            transport.wake()

    # what others ask

    def in_hand(self) -> tuple[str, int]:
        """The run and the round that are open; empty and 0 if none is."""
        machine = self.conductor.machine if self._begun else None
        return (machine.run, machine.number) if machine is not None else ("", 0)

    @property
    def paused(self) -> str:
        """Why runs pause; empty if they do not."""
        return self._disk_problem or self.grants.paused

    @property
    def test_data(self) -> str:
        """The npz file that `evaluate.on = "simulate"` means; empty outside of simulations."""
        return self._options.test_data

    def take_snapshot(self) -> None:
        """Write what a backup contains, as it is between two events."""
        self.conductor.save_traffic()
        snapshot.take(self.store, self.state_dir)

    # from recovery to the end, or to a full disk

    def _serve(self, control: ControlServer) -> None:
        with contextlib.ExitStack() as opened:
            self.begin(opened)
            self._supervisor.ready()
            while not self._stopping:
                self._turn(control)
            self._supervisor.stopping()
            self.conductor.save_traffic()
            self.outbox.announce_state("offline")
            run, number = self.in_hand()
            log.info("stopped%s", f"; run {run} continues with round {number} at the next start" if run else "")

    def _wait_for_space(self, control: ControlServer, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < until:
            self._supervisor.alive(time.monotonic())
            poller = select.poll()
            for fd in control.fds() if self._begun else ():  # before the first start there is nothing to answer with
                poller.register(fd, select.POLLIN)
            control.serve([fd for fd, _ in poller.poll(100)])
            for guest in self.guests if self._begun else ():
                guest.attend((), time.monotonic())

    def begin(self, opened: contextlib.ExitStack) -> None:
        """Recover and connect; what was `opened` is closed even if this fails half-way."""
        now = time.monotonic()
        options = self._options
        snapshot.remove_stale(self.state_dir)
        self.epoch = self.store.settings.next_epoch(int(time.time()))
        devices = self.store.devices.all()
        self.roster = Roster(self.federation, devices, epoch=self.epoch, heartbeat_s=options.heartbeat_s)
        self.accounts = BrokerAccounts(self._broker, self.store, self.topics)
        self.accounts.set_accounts(devices)
        self._arrivals.clear()
        opened.callback(self._aggregation.forget_jobs)
        self._transport = transport = self._connect(self._on_event)
        self.traffic = TrafficMeter()
        self.outbox = Outbox(transport, self.topics, self.roster, self.traffic, after_commit=self.store.after_commit)
        opened.callback(self._disconnect, transport)
        transport.subscribe(self.topics.coordinator_subscribes())
        self.uploads = Uploads(self.blobs, arrived=self._from_thread, steady=options.simulated)
        opened.callback(self.uploads.close)
        self.downloads = Downloads(self.blobs, shares=not options.simulated)
        opened.callback(self.downloads.close)
        self.conductor = Conductor(
            store=self.store,
            blobs=self.blobs,
            uploads=self.uploads,
            downloads=self.downloads,
            traffic=self.traffic,
            aggregation=self._aggregation,
            send=self.outbox.send,
            announce=self.outbox.announce,
            roster=self.roster,
            epoch=self.epoch,
            simulated=options.simulated,
            test_data=options.test_data,
            device_folders=self.state_dir / "devices" if options.simulated else None,
        )
        self.conductor.recover(now)
        self._begin_serving_devices()
        self._tick_at, self._ticked_at = now, now - _SHORTEST_TICK_S
        self._begun, self._disk_problem = True, ""
        self.pictures.start_over()
        transport.connect()

    def _begin_serving_devices(self) -> None:
        self.deployments = Deployments(
            store=self.store,
            blobs=self.blobs,
            roster=self.roster,
            send=self.outbox.send,
            release=self.conductor.release,
        )
        self.chunks = ChunkSender(self.outbox, self.deployments, self.traffic)
        self.grants = UploadGrants(
            self.uploads, self.outbox, folder=self.state_dir, reserve_bytes=self._options.disk_reserve_bytes
        )
        self.router = Router(
            topics=self.topics,
            roster=self.roster,
            traffic=self.traffic,
            uploads=self.uploads,
            downloads=self.downloads,
            conductor=self.conductor,
            deployments=self.deployments,
            outbox=self.outbox,
            tick_soon=self._tick_soon,
        )
        self.enrolment = Enrolment(
            store=self.store,
            accounts=self.accounts,
            roster=self.roster,
            uploads=self.uploads,
            downloads=self.downloads,
            conductor=self.conductor,
            deployments=self.deployments,
            outbox=self.outbox,
        )

    def _disconnect(self, transport: Transport) -> None:
        self._transport = None
        self.outbox.close()
        transport.close()

    def _from_thread(self, arrived: FinishedUpload) -> None:
        self._arrivals.append(arrived)
        if self._transport is not None:
            self._transport.wake()

    def _tick_soon(self) -> None:
        self._tick_at = min(self._tick_at, self._ticked_at + _SHORTEST_TICK_S)

    # the loop

    def _turn(self, control: ControlServer) -> None:
        """What is read and done in one turn is durable before anybody hears of it; requests of people come after that.

        The store's transaction begins with the first write, so nothing is open while this waits.
        """
        assert self._transport is not None
        with self.store.turn():
            ready = self._transport.poll(self.wait_s(), [*control.fds(), *self.fds()])
            self.attend(ready)
        control.serve(ready)
        self._supervisor.alive(time.monotonic())

    def fds(self) -> list[int]:
        """File descriptors to watch beside the connection and the control socket."""
        fds = [fd for guest in self.guests for fd in guest.fds()]
        return [self._aggregation.fd, *fds] if self._aggregation.fd is not None else fds

    def wait_s(self) -> float:
        """How long there is nothing to do, unless something arrives."""
        if self._arrivals:
            return 0.0
        return _BUSY_S if self.downloads.busy else max(0.0, self._tick_at - time.monotonic())

    def attend(self, ready: Sequence[int]) -> None:
        """Do what is due; `ready` are the readable ones of `fds`."""
        now = time.monotonic()
        if self._aggregation.fd in ready:
            self._aggregation.read(now)
            if self.conductor.selecting:  # a round has ended: begin the next one now, not at the next tick
                self._tick_soon()
        while self._arrivals:
            arrived = self._arrivals.popleft()
            if self.uploads.settle(arrived):
                self.conductor.arrived(arrived, now)
        if now >= self._tick_at:
            self._tick(now)
        for guest in self.guests:
            guest.attend(ready, now)
        self.grants.grant(now)
        self.downloads.send(lambda: self.outbox.queued_bytes, self.chunks.send, self.chunks.share, now)

    def _tick(self, now: float) -> None:
        self._ticked_at, self._tick_at = now, now + _TICK_S
        if self._broker is not None:
            self._broker.ensure()
        self.accounts.suspend(self.roster.suspended(now), now)
        self._aggregation.tick(now)
        online = self.roster.online(now)
        for device, share in self.downloads.tick(online, now):
            self.outbox.send(device, share)
        self.conductor.tick(online, self.roster.num_enrolled, now)
        self.deployments.tick(online, now)
        self.pictures.look(self, now)
        for observe in self.observers:
            observe(self, now)
        run, number = self.in_hand()
        work = f"; run {run}, round {number}" if run else ""
        self._supervisor.doing(f"{len(online)} of {self.roster.num_enrolled} devices online{work}")

    # the connection

    def _on_event(self, event: Event) -> None:
        match event:
            case Connected():
                log.info("connected to the broker")
                self._was_connected = self.connected = True
                self.outbox.announce_state(f"online {self.epoch}")
                if (news := self.store.settings.get(ANNOUNCEMENT)) and not self._options.simulated:
                    self.outbox.announce(news)
            case Disconnected():
                if self._broker is None and not self._was_connected:  # somebody else's, and just typed: tell who did
                    raise NetworkError(f"cannot use the broker {', '.join(self.brokers)}: {event.reason}")
                self.connected = False
                log.warning("not connected (%s): %s", event.code, event.reason)
                self.uploads.lost_connection()
                self.downloads.lost_connection()
            case Received():
                self.router.receive(event.topic, event.payload, time.monotonic())
