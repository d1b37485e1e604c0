"""Many devices in one process: the real session, messages and chunks over bare MQTT connections; no disk, no worker.

Covers: what a device says and does on the wire. Does not cover: surviving anything; a lost connection is an error.
"""

from __future__ import annotations

import hashlib
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.no_training_worker import num_samples_of, update_pieces
from edge_client.client.events import Event, Finished, LinkUp, PartReady, Tick, WorkerDone
from edge_client.client.identity import Bundle
from edge_client.client.instructions import BeginSession, Fetch, Instruction, Send, Serve, Start
from edge_client.client.session import Session
from edge_client.records import DeviceProfile, PartRef
from edge_client.transport.base import parse_broker_url
from edge_client.wire.chunks import CHUNK_BYTES, make_chunk, num_chunks, parse_chunk, transfer_id
from edge_client.wire.conversation import Conversation
from edge_client.wire.messages import Message, Pull
from edge_client.wire.reassembly import expand
from edge_client.wire.topics import Topics

__all__ = ["LightFleet"]

_CONNACK, _PUBLISH, _SUBACK = 2, 3, 9
_TICK_S = 0.25
_TOGETHER = 200  # devices that connect before those before them are heard


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">H", len(data)) + data


def _packet(head: int, body: bytes) -> bytes:
    """An MQTT 3.1.1 packet."""
    length, rest = bytearray(), len(body)
    while True:
        rest, low = divmod(rest, 128)
        length.append(low | (128 if rest else 0))
        if not rest:
            return bytes([head]) + bytes(length) + body


class _Connection:
    """A socket that never waits, and the MQTT packets that came."""

    def __init__(self, bundle: Bundle, boot: str) -> None:
        url = parse_broker_url(bundle.brokers[0])
        self.sock = socket.create_connection((url.host, url.port))
        self.sock.setblocking(False)
        self._in, self._out = bytearray(), bytearray()
        user, clean = 0xC0, 0x02  # name and password; nothing is remembered
        names = (f"{bundle.device}-{boot}", bundle.device, bundle.password)
        head = _text("MQTT") + bytes([4, user | clean]) + struct.pack(">H", 600)
        self.send(_packet(0x10, head + b"".join(_text(name) for name in names)))

    def send(self, packet: bytes) -> None:
        self._out += packet
        self.flush()

    def flush(self) -> None:
        """Write what the kernel takes."""
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            return

    def read(self) -> Iterable[tuple[int, bytes]]:
        """Packets as (kind, body)."""
        data = self.sock.recv(1 << 18)
        if not data:
            raise ConnectionError("the broker closed the connection of a device")
        self._in += data
        while (packet := self._next()) is not None:
            yield packet

    def _next(self) -> tuple[int, bytes] | None:
        length = shift = 0
        for position in range(1, min(5, len(self._in))):
            length |= (self._in[position] & 127) << shift
            shift += 7
            if self._in[position] < 128:
                end = position + 1 + length
                if len(self._in) < end:
                    return None
                kind, body = self._in[0] >> 4, bytes(self._in[position + 1 : end])
                del self._in[:end]
                return kind, body
        return None


class _Device:
    """One device: what the daemon does, with everything in memory."""

    def __init__(self, bundle: Bundle, blobs: dict[str, bytes], scratch: Path) -> None:
        self._bundle = bundle
        self._blobs = blobs
        self._scratch = scratch
        self._topics = Topics(bundle.federation)
        boot = secrets.token_hex(8)
        self.session = Session(boot=boot, profile=DeviceProfile(budget_bytes=10**9), labels={}, client="light")
        self.session.free_bytes = 10**12
        self._conversation = Conversation(federation=bundle.federation, device=bundle.device, key=bundle.key_bytes())
        self._wanted: dict[bytes, tuple[PartRef, dict[int, bytes]]] = {}
        self._update = b""
        self.connection = _Connection(bundle, boot)

    def readable(self, now: float) -> None:
        """Take what came."""
        for kind, body in self.connection.read():
            if kind == _CONNACK:
                topics = b"".join(_text(t) + b"\0" for t in self._topics.device_subscribes(self._bundle.device))
                self.connection.send(_packet(0x82, b"\0\1" + topics))
            elif kind == _SUBACK:
                self.handle(LinkUp(), now)
            elif kind == _PUBLISH:
                (size,) = struct.unpack_from(">H", body)
                self._received(body[2 : 2 + size].decode(), body[2 + size :], now)

    def _received(self, topic: str, payload: bytes, now: float) -> None:
        if topic == self._topics.device(self._bundle.device, "down"):
            self._chunk(payload, now)
        elif topic == self._topics.device(self._bundle.device, "cmd"):
            self.handle(self._conversation.open(payload), now)

    def handle(self, event: Event, now: float) -> None:
        """Let the session decide, and do it."""
        for instruction in self.session.handle(event, now):
            self._carry_out(instruction, now)

    def _carry_out(self, instruction: Instruction, now: float) -> None:
        match instruction:
            case Send(message):
                self._send(message)
            case BeginSession(session):
                self._conversation.begin(session)
            case Fetch(part):
                self._wanted[transfer_id(part.sha256)] = (part, {})
                if len(self._wanted) == 1:  # one part at a time, as the daemon does
                    self._pull(part)
            case Start(assign):
                run, model = (self._file(part) for part in assign.parts)
                self._update = b"".join(update_pieces(run, model, self._bundle.device, assign.round))
                sha256 = hashlib.sha256(self._update).hexdigest()
                num_samples = num_samples_of(self._bundle.device)
                finished = Finished(sha256=sha256, length=len(self._update), num_samples=num_samples)
                self.handle(WorkerDone(assign.lease, finished), now)
            case Serve(update, ranges):
                for index in expand(ranges, num_chunks(update.length)):
                    body = self._update[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
                    self._publish("data", make_chunk(transfer_id(update.sha256), index, body))
            case _:
                pass  # Save, Stop, Forget: nothing is on disk, nothing runs

    def _send(self, message: Message) -> None:
        self._publish("up", self._conversation.seal(message))

    def _publish(self, channel: str, payload: bytes) -> None:
        self.connection.send(_packet(0x30, _text(self._topics.device(self._bundle.device, channel)) + payload))

    def _pull(self, part: PartRef) -> None:
        self._send(Pull(sha256=part.sha256, ranges=((0, num_chunks(part.length)),)))

    def _chunk(self, payload: bytes, now: float) -> None:
        chunk = parse_chunk(payload)
        if chunk.transfer not in self._wanted:
            return
        part, chunks = self._wanted[chunk.transfer]
        chunks[chunk.index] = bytes(chunk.body)
        if len(chunks) == num_chunks(part.length):
            del self._wanted[chunk.transfer]
            self._blobs[part.sha256] = b"".join(chunks[index] for index in sorted(chunks))
            for waiting, _ in list(self._wanted.values())[:1]:
                self._pull(waiting)
            self.handle(PartReady(part.sha256), now)

    def _file(self, part: PartRef) -> Path:
        path = self._scratch / part.sha256
        if not path.exists():
            path.write_bytes(self._blobs[part.sha256])
        return path


class LightFleet:
    """All devices of a list of bundles; `turn` is to be called again and again."""

    def __init__(self, bundles: Iterable[Bundle], scratch: Path) -> None:
        scratch.mkdir(exist_ok=True)
        blobs: dict[str, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._devices: list[_Device] = []
        self._tick_at = 0.0
        for bundle in bundles:
            device = _Device(bundle, blobs, scratch)
            self._devices.append(device)
            self._selector.register(device.connection.sock, selectors.EVENT_READ, device)
            if len(self._devices) % _TOGETHER == 0:
                self.turn(0.01)  # the broker waits for an answer of those that it has let in

    @property
    def num_online(self) -> int:
        """Devices that the coordinator has let in."""
        return sum(device.session.online for device in self._devices)

    def turn(self, timeout_s: float) -> None:
        """Wait for messages, at most `timeout_s`, and take them."""
        for key, _ in self._selector.select(timeout_s):
            key.data.readable(time.monotonic())
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick_at = now + _TICK_S
            for device in self._devices:
                device.connection.flush()
                if now >= device.session.next_due():
                    device.handle(Tick(), now)

    def close(self) -> None:
        """Hang up."""
        self._selector.close()
        for device in self._devices:
            device.connection.sock.close()
