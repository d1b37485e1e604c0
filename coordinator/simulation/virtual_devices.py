"""Devices of a simulation: the real session, messages and chunks over the hub in memory; one disk and one pool for all.

Each device fetches every chunk of its parts and sends every chunk of its update, so that bytes are those of a fleet;
but the disk keeps one copy of what they all fetched, and a device is a few kilobytes. Nothing is lost on the way: links
always keep up, whatever else this machine does, and nothing is said twice. So bytes are the same at any load.

Covers: what the daemon does for its session, as far as a device that never drops out needs it.
Does not cover: surviving. After a restart virtual devices begin anew and are offered their leases again; only what
their methods keep outlives them (`settle_left`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.simulation.worker_pool import WorkerPool
from coordinator.store.rows import DeviceRow
from edge_client import __version__, durable
from edge_client.client import workers
from edge_client.client.session import (
    BeginSession,
    Event,
    Fetch,
    Finished,
    Forget,
    Instruction,
    LinkUp,
    PartReady,
    Remember,
    Save,
    Send,
    Serve,
    Session,
    Start,
    Stop,
    Tick,
)
from edge_client.records import DeviceProfile, PartRef
from edge_client.transport.base import Connected, Received
from edge_client.transport.base import Event as TransportEvent
from edge_client.transport.blobs import BlobStore, Incoming, Outgoing
from edge_client.transport.inproc import Hub
from edge_client.wire.chunks import Chunk, num_chunks, parse_chunk
from edge_client.wire.conversation import Conversation
from edge_client.wire.flow_control import PULL_WINDOW_BYTES
from edge_client.wire.messages import Assign, Hello, Message, Pull
from edge_client.wire.reassembly import Range, Reassembly, expand
from edge_client.wire.topics import Topics

__all__ = ["SharedParts", "Surroundings", "VirtualDevice", "settle_left"]

_TIME_OF_LINKS = 0.0  # stands still: every window comes at once
_FREE_BYTES = 2**40  # the disk is one for all: when it is full, the simulation ends with that
_NO_LIMIT = 2**53  # of memory


class SharedParts:
    """The parts that virtual devices fetched, on disk once: whoever has a part's every chunk finds it here."""

    def __init__(self, folder: Path, *, keep: set[str]) -> None:
        """`keep` are those of an earlier process that its devices still have; the others are removed."""
        self._blobs = BlobStore(folder / "parts", folder / "arriving")
        self._blobs.keep_only(keep, set())
        self._arriving: dict[str, Incoming] = {}
        self._last_round: dict[str, int] = {}

    def path(self, sha256: str) -> Path:
        """Where a part is that was fetched."""
        return self._blobs.path(sha256)

    def has(self, sha256: str) -> bool:
        """Whether it is there, whole."""
        return self._blobs.has(sha256)

    def add(self, part: PartRef, chunk: Chunk, now: float) -> None:
        """A chunk came to some device; the first one of its index is written."""
        if self._blobs.has(part.sha256):
            return
        incoming = self._arriving.get(part.sha256)
        if incoming is None:
            incoming = self._arriving[part.sha256] = Incoming(
                self._blobs,
                part.sha256,
                sha256=part.sha256,
                length=part.length,
                max_window_bytes=PULL_WINDOW_BYTES,
                point="daemon.part",
                sync=False,
            )
        if not incoming.chunks.has(chunk.index):
            incoming.add(chunk, now)
        if incoming.chunks.complete:
            incoming.finish()
            incoming.close()
            del self._arriving[part.sha256]

    def used(self, parts: Sequence[PartRef], round_: int) -> None:
        """An assignment of that round names these; what neither it nor the round before named is removed."""
        for part in parts:
            self._last_round[part.sha256] = round_
        for sha256 in [sha256 for sha256, last in self._last_round.items() if last < round_ - 1]:
            del self._last_round[sha256]
            self._blobs.remove(sha256)

    def close(self) -> None:
        """Let go of all files."""
        for incoming in self._arriving.values():
            incoming.close()
        self._arriving.clear()


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
        self._tasks = dict(tasks)
        self._around = around
        self._folder = around.folder / row.name
        self._work = self._folder / "work"
        topics = around.topics
        self._up, self._data = topics.device(row.name, "up"), topics.device(row.name, "data")
        self._cmd, self._down = topics.device(row.name, "cmd"), topics.device(row.name, "down")
        self._conversation = Conversation(federation=topics.federation, device=row.name, key=bytes.fromhex(row.key))
        self.session = Session(
            boot=secrets.token_hex(8),
            profile=DeviceProfile(budget_bytes=training_budget_bytes or _NO_LIMIT, kind="virtual"),
            labels=dict(labels),
            client=__version__,
        )
        self.session.free_bytes = _FREE_BYTES
        self._ceilings: dict[str, int] = {}  # what went over the budget here
        self.held: set[str] = set()  # parts that a real device would have on its disk
        self._fetching: dict[bytes, tuple[PartRef, Reassembly]] = {}
        self._outgoing: Outgoing | None = None
        self._transport = around.hub.transport(row.name, self._on_transport)
        self._transport.subscribe((self._cmd, self._down))
        self._transport.connect()

    def tick(self, now: float) -> None:
        """Let time pass, if that is due."""
        if self.session.update is None and now >= self.session.next_due():  # an update that was offered is known
            self.handle(Tick())

    def handle(self, event: Event) -> None:
        """Let the session decide, and do it."""
        for instruction in self.session.handle(event, time.monotonic()):
            self._carry_out(instruction)

    # what the hub brings

    def _on_transport(self, event: TransportEvent) -> None:
        if isinstance(event, Connected):
            self.handle(LinkUp())
        elif isinstance(event, Received) and event.topic == self._down:
            self._chunk(parse_chunk(event.payload))
        elif isinstance(event, Received) and event.topic == self._cmd:
            self.handle(self._conversation.open(event.payload))

    def _chunk(self, chunk: Chunk) -> None:
        part, chunks = self._fetching.get(chunk.transfer, (None, None))
        if part is None or chunks is None:
            return  # a late one of a part that is here already
        if chunks.accept(chunk, _TIME_OF_LINKS) is not None:
            with durable.disk_errors("cannot store a part"):
                self._around.parts.add(part, chunk, _TIME_OF_LINKS)
        if chunks.complete:
            del self._fetching[chunk.transfer]
            self.held.add(part.sha256)
            self.handle(PartReady(part.sha256))
        self._pull()

    # what the session wants

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Send(message):
                self._send(message)
            case BeginSession(session):
                self._conversation.begin(session)
            case Save(assign):
                self._take(assign)
            case Fetch(part):
                self._fetch(part)
            case Remember(ceiling):
                self._ceilings[ceiling.key] = ceiling.training_bytes
            case Start():
                self._start(instruction)
            case Stop(lease):
                self._around.pool.forget(lease)
            case Serve(update, ranges):
                self._serve(update, ranges)
            case Forget(lease, accepted):
                self._forget(lease, accepted)

    def _send(self, message: Message) -> None:
        if isinstance(message, Hello):
            message = replace(message, tasks=self._tasks)
        self._transport.publish(self._up, self._conversation.seal(message))

    def _take(self, assign: Assign) -> None:
        with durable.disk_errors("cannot keep the method's state"):
            workers.count_method_state(self._folder / "method-state" / assign.run, assign.counted)
        self.held &= {part.sha256 for part in assign.parts}
        self._around.parts.used(assign.parts, assign.round)

    def _fetch(self, part: PartRef) -> None:
        if part.sha256 in self.held and self._around.parts.has(part.sha256):
            self.handle(PartReady(part.sha256))
            return
        chunks = Reassembly(sha256=part.sha256, length=part.length, max_window_bytes=PULL_WINDOW_BYTES)
        self._fetching.setdefault(chunks.transfer, (part, chunks))
        self._pull()

    def _pull(self) -> None:
        for _, chunks in self._fetching.values():
            ranges = chunks.pull(_TIME_OF_LINKS)
            if ranges is not None:
                self._send(Pull(sha256=chunks.sha256, ranges=ranges, heard=chunks.heard))
            break  # one part at a time, as the daemon does

    def _start(self, wanted: Start) -> None:
        assign = wanted.assign
        with durable.disk_errors("cannot prepare the worker"):
            workers.write_order(
                wanted,
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

    def _serve(self, update: Finished, ranges: tuple[Range, ...]) -> None:
        with durable.disk_errors("cannot read the update"):
            if self._outgoing is None:
                self._outgoing = Outgoing(self._work / "update.bin", update.sha256, update.length)
            for index in expand(ranges, num_chunks(update.length)):
                self._transport.publish(self._data, self._outgoing.chunk(index))

    def _forget(self, lease: str, accepted: bool) -> None:
        self._fetching.clear()
        if self._outgoing is not None:
            self._outgoing.close()
            self._outgoing = None
        _settle(self._folder, lease, accepted)

    def close(self) -> None:
        """Leave the hub."""
        self._transport.close()
        if self._outgoing is not None:
            self._outgoing.close()


def settle_left(folder: Path, was_stored: Callable[[str], bool]) -> None:
    """End what the devices of an earlier process had in hand: what their methods wrote stays if its update does."""
    for order in sorted(folder.glob("*/work/order.json")):
        try:
            lease = str(json.loads(order.read_bytes())["lease"])
        except (ValueError, KeyError):  # it was being written
            lease = ""
        _settle(order.parents[1], lease, was_stored(lease))


def _settle(folder: Path, lease: str, accepted: bool) -> None:
    """A device's lease is over. Its folder stays: making and removing one costs more than all its files."""
    with durable.disk_errors(f"cannot clean up {folder}"):
        workers.settle_method_state(folder / "method-state", lease, accepted=accepted)
        for file in (folder / "work").glob("*"):
            file.unlink(missing_ok=True)
