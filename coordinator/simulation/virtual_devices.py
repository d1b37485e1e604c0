"""Devices of a simulation: the real session, messages, transfers and chunks over the hub in memory; one pool for all.

`VirtualDevice` carries out the session's instructions with the parts of the daemon (`edge_client.client.link` and
`transfers`); it differs in what surrounds them: a disk that all devices share (`shared_parts`), a pool of workers
(`worker_pool`), and a clock of the links that stands still. So nothing is lost or repeated on the way, whatever else
this machine does, bytes are the same at any load, and a device is a few kilobytes.

Does not cover: surviving. After a restart virtual devices begin anew and are offered their leases again; only what
their methods keep outlives them (`settle_left`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.simulation.shared_parts import PartsOfDevice, SharedParts
from coordinator.simulation.worker_pool import WorkerPool
from coordinator.store.rows import DeviceRow
from edge_client import __version__, durable
from edge_client.client import workers
from edge_client.client.events import Event, LinkUp, Tick, UpdateLost
from edge_client.client.instructions import (
    BeginSession,
    Fetch,
    Forget,
    Instruction,
    Remember,
    Save,
    Send,
    Serve,
    Start,
    Stop,
)
from edge_client.client.link import CoordinatorLink
from edge_client.client.method_state import count_method_state, settle_method_state
from edge_client.client.session import Session
from edge_client.client.transfers import ClientTransfers
from edge_client.records import DeviceProfile
from edge_client.transport.base import Connected, Received
from edge_client.transport.base import Event as TransportEvent
from edge_client.transport.inproc import Hub
from edge_client.wire.messages import Assign, Hello, Share
from edge_client.wire.topics import Topics

__all__ = ["Surroundings", "VirtualDevice", "settle_left"]

_FREE_BYTES = 2**40  # the disk is one for all: when it is full, the simulation ends with that
_NO_LIMIT = 2**53  # of memory, and of what the hub takes at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all devices of a simulation share."""

    hub: Hub
    topics: Topics
    parts: SharedParts
    pool: WorkerPool
    folder: Path  # a folder for each device below


class VirtualDevice:
    """One device; its events are handled at once, because nothing here waits."""

    def __init__(
        self,
        row: DeviceRow,
        *,
        device_file: Mapping[str, Any],
        labels: Mapping[str, str],
        tasks: Mapping[str, str],
        training_budget_bytes: int | None,
        around: Surroundings,
    ) -> None:
        """`device_file` is its resolved device.toml; `tasks` are what it allows: name -> hash of the file."""
        self.name = row.name
        self.training_budget_bytes = training_budget_bytes
        self._device_file = device_file
        self._tasks = tasks
        self._around = around
        self._folder = around.folder / row.name
        self._work = self._folder / "work"
        self._events: list[Event] = []
        self.session = Session(
            boot=secrets.token_hex(8),
            profile=DeviceProfile(budget_bytes=training_budget_bytes or _NO_LIMIT, kind="virtual"),
            labels=dict(labels),
            client=__version__,
        )
        self.session.free_bytes = _FREE_BYTES
        self._ceilings: dict[str, int] = {}  # plans that went over the budget here
        self.parts = PartsOfDevice(around.parts)
        topics = around.topics
        self._transport = around.hub.transport(row.name, self._on_transport)
        self._link = CoordinatorLink(
            device=row.name,
            topics=topics,
            key=bytes.fromhex(row.key),
            transport=self._transport,
            complete_hello=self._complete_hello,
        )
        self._transfers = ClientTransfers(
            device=row.name,
            topics=topics,
            transport=self._transport,
            store=self.parts,
            send=self._link.send,
            is_online=_always,
            on_event=self.handle,
            clock=_standing_still,
            send_ahead_bytes=_NO_LIMIT,
        )
        self._transport.subscribe((topics.device(row.name, "cmd"), topics.device(row.name, "down")))
        self._transport.connect()

    def _complete_hello(self, hello: Hello) -> Hello:
        return replace(hello, tasks=dict(self._tasks))

    def tick(self, now: float) -> None:
        """Let time pass, if that is due."""
        if self.session.update is None and now >= self.session.next_due():  # an update that was offered is known
            self.handle(Tick())

    def handle(self, event: Event) -> None:
        """Let the session decide, and do it; an event that comes up meanwhile has its turn afterwards."""
        self._events.append(event)
        if len(self._events) == 1:
            while self._events:
                for instruction in self.session.handle(self._events[0], time.monotonic()):
                    self._carry_out(instruction)
                del self._events[0]

    def _on_transport(self, event: TransportEvent) -> None:
        if isinstance(event, Connected):
            self.handle(LinkUp())
        elif isinstance(event, Received) and not self._transfers.receive(event.topic, event.payload):
            message = self._link.receive(event.topic, event.payload)
            if isinstance(message, Share):
                self._transfers.share(message)
            elif message is not None:
                self.handle(message)
        self._transfers.turn()

    # what the session wants

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Send(message):
                self._link.send(message)
            case BeginSession(session):
                self._link.begin_session(session)
                self._transfers.begin_session()
            case Save(assign):
                self._save(assign)
            case Fetch(part):
                self._transfers.fetch(part, point="daemon.part")
            case Remember(ceiling):
                self._ceilings[ceiling.key] = ceiling.training_bytes
            case Start():
                self._start_worker(instruction)
            case Stop(lease):
                self._around.pool.forget(lease)
            case Serve():
                self._serve(instruction)
            case Forget(lease, accepted):
                self._transfers.close()
                _settle(self._folder, lease, accepted)

    def _save(self, assign: Assign) -> None:
        with durable.disk_errors("cannot keep the method's state"):
            count_method_state(self._folder / "method-state" / assign.run, assign.counted)
        self.parts.keep_only(assign.parts)
        self._around.parts.use(assign.parts, assign.round)

    def _start_worker(self, start: Start) -> None:
        assign = start.assign
        with durable.disk_errors("cannot prepare the worker"):
            workers.write_order(
                start,
                folder=self._work,
                parts={part.key: str(self._around.parts.path(part.sha256)) for part in assign.parts},
                device=self.name,
                device_file=self._device_file,
                budget_bytes=_NO_LIMIT,
                training_budget_bytes=self.training_budget_bytes,
                ceilings=self._ceilings,
                method_state=self._folder / "method-state" / assign.run,
                ledger=self._folder / "privacy-ledger",
            )
        self._around.pool.submit(assign.lease, self._work, self.handle)

    def _serve(self, serve: Serve) -> None:
        assign = self.session.assign
        assert assign is not None
        if not self._transfers.serve(serve.update, self._work, serve.ranges):
            self.handle(UpdateLost(assign.lease))

    def close(self) -> None:
        """Leave the hub."""
        self._transport.close()
        self._transfers.close()


def _always() -> bool:
    """Nobody drops out of a simulation."""
    return True


def _standing_still() -> float:
    """The clock of the links: no chunk is ever late, and every window comes at once."""
    return 0.0


def settle_left(folder: Path, was_stored: Callable[[str], bool]) -> None:
    """End the leases of an earlier process's devices: what their methods wrote stays if the update was stored."""
    for order in sorted(folder.glob("*/work/order.json")):
        try:
            lease = str(json.loads(order.read_bytes())["lease"])
        except (ValueError, KeyError):  # it was being written
            lease = ""
        _settle(order.parents[1], lease, was_stored(lease))


def _settle(folder: Path, lease: str, accepted: bool) -> None:
    """A device's lease is over. Its folder stays: making and removing one costs more than all its files."""
    with durable.disk_errors(f"cannot clean up {folder}"):
        settle_method_state(folder / "method-state", lease, accepted=accepted)
        for file in (folder / "work").glob("*"):
            file.unlink(missing_ok=True)
