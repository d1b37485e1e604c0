"""Devices that follow a script instead of training, and an enemy with the broker's rights; both speak the real wire.

A `ScriptedDevice` joins with a real bundle through the real transport. Its `Script` says what it answers to an
assignment; the default is an honest update whose tensors all have one value, so that a mean is known by hand.
An `Eavesdropper` hears everything that goes through the broker, and repeats, damages, redirects and invents messages.
"""

from __future__ import annotations

import hashlib
import random
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from edge_client.client.identity import Bundle
from edge_client.device.profile import measure
from edge_client.records import Report, to_map
from edge_client.transport.base import Connected, Event, Received, parse_broker_url
from edge_client.transport.mqtt import Backoff, MqttTransport
from edge_client.wire.chunks import CHUNK_BYTES, make_chunk, num_chunks, parse_chunk, transfer_id
from edge_client.wire.messages import (
    Accept,
    Assign,
    Cancel,
    Decline,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Offer,
    Pull,
    Receipt,
    Refuse,
    Welcome,
    context_down,
    context_up,
    open_message,
    seal_message,
)
from edge_client.wire.reassembly import expand
from edge_client.wire.tensors import ContainerReader, write_container
from edge_client.wire.topics import Topics

_FAST = Backoff(min_s=0.02, max_s=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a device offers, and the bytes that it then sends."""

    data: bytes
    num_samples: int
    sha256: str = ""  # empty: the right one
    length: int | None = None  # None: the right one


Make = Callable[[Path, Path], Sent]  # the received model, a place for a file -> what to send


def container(
    base: Path,
    out: Path,
    *,
    value: float = 1.0,
    num_samples: int = 10,
    codec: str = "fp32",
    longer: int = 0,
    drop: int = 0,
) -> bytes:
    """An update whose tensors all hold `value`, their first dimension `longer` than asked, without the last `drop`."""
    with ContainerReader(base) as reader:
        entries = reader.header.entries[: len(reader.header.entries) - drop]
        tensors = [torch.full((entry.shape[0] + longer, *entry.shape[1:]), value) for entry in entries]
    report = Report(num_samples=num_samples, steps=1, payload="params")
    table = [(entry.name, codec, tuple(tensor.shape)) for entry, tensor in zip(entries, tensors, strict=True)]
    write_container(out, to_map(report), table, tensors)
    return out.read_bytes()


def honest(value: float, num_samples: int = 10) -> Make:
    """An update as it should be."""
    return lambda base, out: Sent(
        data=container(base, out, value=value, num_samples=num_samples), num_samples=num_samples
    )


@dataclass(slots=True, kw_only=True)
class Script:
    """What a device does with an assignment."""

    make: Make = field(default_factory=lambda: honest(1.0))
    accepts: bool = True
    delivers: bool = True


class ScriptedDevice:
    """A device in the test's own thread; `poll` lets it work."""

    def __init__(self, bundle: Bundle, folder: Path, script: Script, *, key: bytes | None = None) -> None:
        """`key` other than the bundle's makes it an impostor."""
        self.bundle = bundle
        self.script = script
        self.assigns: list[Assign] = []
        self.receipts: list[Receipt] = []
        self.refusals: list[Refuse] = []
        self.num_sessions = 0
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._key = key or bundle.key_bytes()
        self._topics = Topics(bundle.federation)
        self._boot = secrets.token_hex(8)
        self._session, self._seq = "", 0
        self._parts: dict[bytes, dict[int, bytes]] = {}
        self._sent: Sent | None = None
        self._lease = ""
        url = parse_broker_url(bundle.brokers[0])
        self.transport = MqttTransport(
            host=url.host,
            port=url.port,
            name=bundle.device,
            password=bundle.password,
            on_event=self._on_event,
            backoff=_FAST,
        )
        self.transport.subscribe(self._topics.device_subscribes(bundle.device))
        self.transport.connect()

    def poll(self, timeout_s: float = 0.005) -> None:
        """Do what is due."""
        self.transport.poll(timeout_s)

    def close(self) -> None:
        """Leave without a word."""
        self.transport.close()

    def publish(self, channel: str, payload: bytes, *, device: str | None = None) -> None:
        """Any bytes on a topic of this device, or of another one."""
        self.transport.publish(self._topics.device(device or self.bundle.device, channel), payload)

    def say(self, message: Message) -> bytes:
        """Send a message; returns its bytes, for replays."""
        session = "" if isinstance(message, Hello) else self._session
        context = context_up(self.bundle.federation, self.bundle.device)
        data = seal_message(message, session=session, seq=self._seq, key=self._key, context=context)
        self._seq += 1
        self.publish("up", data)
        return data

    def heartbeat(self) -> None:
        """A sign of life."""
        self.say(Heartbeat(state="working" if self._lease else "idle", lease=self._lease or None, free_bytes=2**40))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Connected):
            self.hello()
        elif isinstance(event, Received) and event.topic.endswith("/cmd"):
            context = context_down(self.bundle.federation, self.bundle.device)
            self._hear(open_message(event.payload, key=self.bundle.key_bytes(), context=context).message)
        elif isinstance(event, Received) and event.topic.endswith("/down"):
            chunk = parse_chunk(event.payload)
            self._parts.setdefault(chunk.transfer, {})[chunk.index] = bytes(chunk.body)
            self._offer_if_complete()

    def hello(self) -> bytes:
        """The first word."""
        hello = Hello(boot=self._boot, hello=1, profile=measure(10**9), labels={}, free_bytes=2**40)
        return self.say(hello)

    def _hear(self, message: Message) -> None:
        match message:
            case Welcome():
                self._session, self._seq = message.session, 0
                self.num_sessions += 1
            case Refuse():
                self.refusals.append(message)
                if message.code == "session":
                    self.hello()
            case Assign():
                self._assigned(message)
            case Grant():
                self._serve(message)
            case Receipt():
                self.receipts.append(message)
                self._lease = ""
            case Cancel():
                self._lease = ""
            case _:
                pass

    def _assigned(self, assign: Assign) -> None:
        if not self.script.accepts or assign.lease == self._lease:
            return
        self.assigns.append(assign)
        self._lease, self._sent, self._parts = assign.lease, None, {}
        self.say(Accept(lease=assign.lease))
        model = assign.parts[-1]
        self.say(Pull(sha256=model.sha256, ranges=((0, num_chunks(model.length)),)))

    def _offer_if_complete(self) -> None:
        model = self.assigns[-1].parts[-1]
        chunks = self._parts.get(transfer_id(model.sha256), {})
        if self._sent is not None or not self.script.delivers or len(chunks) < num_chunks(model.length):
            return
        base = self._folder / "base"
        base.write_bytes(b"".join(chunks[index] for index in sorted(chunks)))
        self._sent = self.script.make(base, self._folder / "update")
        self.offer(self.assigns[-1], self._sent)

    def offer(self, assign: Assign, sent: Sent) -> None:
        """Offer an update for a lease, this one's or any other."""
        self.say(
            Offer(
                lease=assign.lease,
                run=assign.run,
                round=assign.round,
                sha256=sent.sha256 or hashlib.sha256(sent.data).hexdigest(),
                length=len(sent.data) if sent.length is None else sent.length,
                num_samples=sent.num_samples,
            )
        )

    def _serve(self, grant: Grant) -> None:
        assert self._sent is not None
        for index in expand(grant.ranges, num_chunks(len(self._sent.data))):
            body = self._sent.data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            self.publish("data", make_chunk(transfer_id(grant.sha256), index, body))


class Eavesdropper:
    """Somebody who took over the broker: hears all, and says what it likes, but has no device's key."""

    def __init__(self, state_dir: Path, rng: random.Random) -> None:
        self.num_sent: Counter[str] = Counter()
        self._rng = rng
        config = (state_dir / "broker" / "nats.conf").read_text()
        password = re.search(r'user: "coordinator", password: "([^"]+)"', config)
        port = re.search(r"mqtt \{\n  host: .*\n  port: (\d+)", config)
        topic = re.search(r'"fl\.v1\.([^".]+)\.', config)
        assert password
        assert port
        assert topic
        self._topics = Topics(topic[1])
        self._heard: list[tuple[str, bytes]] = []
        self._known: set[tuple[str, bytes]] = set()
        self._transport = MqttTransport(
            host="127.0.0.1",
            port=int(port[1]),
            name="coordinator",
            password=password[1],
            on_event=self._on_event,
            backoff=_FAST,
        )
        self._transport.subscribe((self._topics.everything,))
        self._ready, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="eavesdropper", daemon=True)

    def __enter__(self) -> Eavesdropper:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._transport.wake()
        self._thread.join()
        self._transport.close()

    def _run(self) -> None:
        self._transport.connect()
        while not self._ended.is_set():
            self._transport.poll(3600.0)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Connected):
            self._ready.set()
        if isinstance(event, Received) and "/dev/" in event.topic and (event.topic, event.payload) not in self._known:
            self._known.add((event.topic, event.payload))
            self._heard.append((event.topic, event.payload))
            self._repeat(event.topic, event.payload)

    def _send(self, what: str, topic: str, payload: bytes) -> None:
        self._known.add((topic, payload))
        self.num_sent[what] += 1
        self._transport.publish(topic, payload)

    def _repeat(self, topic: str, payload: bytes) -> None:
        self._send("repeated", topic, payload)
        damaged = bytearray(payload or b"\0")
        damaged[self._rng.randrange(len(damaged))] ^= 1 << self._rng.randrange(8)
        self._send("damaged", topic, bytes(damaged))
        self._send("old", *self._rng.choice(self._heard))
        *head, device, channel = topic.split("/")
        self._send("redirected", "/".join((*head, "b" if device == "a" else "a", channel)), payload)
        self._send("invented", topic, self._rng.randbytes(self._rng.randrange(1, 200)))
        self._send("forged", self._topics.device(device, "cmd"), self._forged(device, "down"))
        self._send("forged", self._topics.device(device, "up"), self._forged(device, "up"))

    def _forged(self, device: str, way: str) -> bytes:
        """A message that would end a lease, if anybody believed it."""
        lease, key = secrets.token_hex(16), bytes(32)
        if way == "up":
            context = context_up(self._topics.federation, device)
            return seal_message(Decline(lease=lease, code="forged"), session="0", seq=1, key=key, context=context)
        context = context_down(self._topics.federation, device)
        return seal_message(Cancel(lease=lease), session="0", seq=1, key=key, context=context)
