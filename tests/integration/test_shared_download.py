"""The shared download topic with the real broker and real clients: published once, and a slow device harms nobody.

The coordinator's part is played by its own roster and downloads; the clients' workers sleep.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from proxy import Link, Proxy
from rows import assign, device_row
from sites import access_of

from coordinator.broker.broker import EmbeddedBroker
from coordinator.fleet.downloads import Downloads
from coordinator.fleet.roster import Roster
from edge_client.client.daemon import Daemon
from edge_client.client.identity import Bundle
from edge_client.config.device_file import DeviceFile, LimitsSection
from edge_client.records import PartRef
from edge_client.transport.base import Connected, Disconnected, Event, Received
from edge_client.transport.blobs import BlobStore
from edge_client.transport.mqtt import MqttTransport
from edge_client.wire.chunks import CHUNK_BYTES
from edge_client.wire.flow_control import SHARED_WINDOW_CHUNKS
from edge_client.wire.messages import Accept, Hello, Message, Pull
from edge_client.wire.topics import Topics

pytestmark = pytest.mark.broker

TOPICS = Topics("f1")
NAMES = ("a", "b", "c")
NUM_CHUNKS = 4 * SHARED_WINDOW_CHUNKS
SECONDS = 20.0


class Hall:
    """The coordinator's side: lets devices in, assigns the blob when all are here, and serves their pulls.

    The first pull of each listener waits until all three listen, so that none is done before the others have begun.
    """

    def __init__(self, folder: Path, broker: EmbeddedBroker) -> None:
        self.rows = {user.name: device_row(user.name, password=user.password) for user in broker.users[1:]}
        self._roster = Roster("f1", self.rows.values(), epoch=1, heartbeat_s=60.0)
        data = random.Random(9).randbytes(NUM_CHUNKS * CHUNK_BYTES - 7)
        self.part = PartRef(key="model", sha256=hashlib.sha256(data).hexdigest(), length=len(data))
        blobs = BlobStore(folder / "blobs", folder / "tmp")
        blobs.write(data, self.part.sha256, point="test")
        self.downloads = Downloads(blobs)
        self.num_own = dict.fromkeys(NAMES, 0)
        self.num_shared = 0
        self._here: set[str] = set()
        self._accepted: set[str] = set()
        self._first_pulls: dict[str, Pull] | None = {}
        self.listening: set[str] = set()
        self.sent_back: set[str] = set()
        user = broker.users[0]
        self._transport = MqttTransport(
            host="127.0.0.1", port=broker.port, name=user.name, password=user.password, on_event=self._on_event
        )
        self._transport.subscribe(TOPICS.coordinator_subscribes())
        self._transport.connect()

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, Received) or not event.topic.endswith("/up"):
            return
        device, _ = TOPICS.parse_device(event.topic)
        now = time.monotonic()
        message, reply = self._roster.receive(device, event.payload, now)
        if reply is not None:
            self._transport.publish(TOPICS.device(device, "cmd"), reply)
        if isinstance(message, Hello):
            self._here.add(device)
        elif isinstance(message, Accept):
            self._accepted.add(device)
        elif isinstance(message, Pull):
            self._pulled(device, message, now)

    def _pulled(self, device: str, pull: Pull, now: float) -> None:
        (self.listening.discard if pull.heard is None else self.listening.add)(device)
        if self._first_pulls is not None and pull.heard is not None:
            self._first_pulls[device] = pull
            if len(self._first_pulls) == len(NAMES):
                waiting, self._first_pulls = self._first_pulls, None
                for name, first in waiting.items():
                    self._pulled(name, first, now)
            return
        answer = self.downloads.ask(device, pull.sha256, self.part.length, pull.ranges, heard=pull.heard, now=now)
        if answer is not None:
            self._send(device, answer)

    def _send(self, device: str, message: Message) -> None:
        sealed = self._roster.seal(device, message)
        if sealed is not None:
            self._transport.publish(TOPICS.device(device, "cmd"), sealed)

    def _own(self, device: str, payload: bytes) -> None:
        self.num_own[device] += 1
        self._transport.publish(TOPICS.device(device, "down"), payload)

    def _share(self, devices: tuple[str, ...], payload: bytes) -> None:
        self.num_shared += 1
        self._transport.publish(TOPICS.shared_down, payload)

    def serve_until(self, done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < end_s, f"shared {self.num_shared}, own {self.num_own}, {self.listening} listen"
            self._transport.poll(0.005)
            now = time.monotonic()
            for device in (self._here - self._accepted) if len(self._here) == len(NAMES) else ():
                self._send(device, assign(parts=(self.part,)))  # again: it may come before the welcome was read
            for device, share in self.downloads.tick(frozenset(NAMES), now):
                self.sent_back.add(device)
                self._send(device, share)
            self.downloads.send(lambda: self._transport.queued_bytes, self._own, self._share, now)

    def close(self) -> None:
        self._transport.close()
        self.downloads.close()


class Device:
    """A real client in a thread."""

    def __init__(self, hall: Hall, folder: Path, name: str, port: int) -> None:
        row = hall.rows[name]
        self.lost: list[Disconnected] = []
        self.num_connected = 0
        bundle = Bundle(federation="f1", device=name, brokers=("mqtt://h",), password=row.password, key=row.key)

        def connect(on_event: Callable[[Event], None], boot: str) -> MqttTransport:
            def note(event: Event) -> None:
                self.num_connected += isinstance(event, Connected)
                if isinstance(event, Disconnected):
                    self.lost.append(event)
                on_event(event)

            return MqttTransport(
                host="127.0.0.1", port=port, name=name, password=row.password, on_event=note, boot_id=boot
            )

        self._daemon = Daemon(
            bundle=bundle,
            device_file=DeviceFile(limits=LimitsSection(memory=10**9)),
            state_dir=folder / name,
            connect=connect,
            worker_command=(sys.executable, "-c", "import time; time.sleep(60)"),
        )
        self.blob = BlobStore(folder / name / "blobs", folder / name / "tmp").path(hall.part.sha256)
        self._thread = threading.Thread(target=self._daemon.run, name=name, daemon=True)
        self._thread.start()

    @property
    def has_it(self) -> bool:
        """Its hash was checked before it got its name."""
        return self.blob.exists()

    def stop(self) -> None:
        self._daemon.request_stop()
        self._thread.join(15)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    made = EmbeddedBroker(
        tmp_path / "broker",
        coordinator=access_of(TOPICS, "coordinator"),
        devices=[access_of(TOPICS, name) for name in NAMES],
    )
    made.start()
    yield made
    made.stop()


@pytest.fixture
def hall(tmp_path: Path, broker: EmbeddedBroker) -> Iterator[Hall]:
    made = Hall(tmp_path / "hall", broker)
    yield made
    made.close()


@contextlib.contextmanager
def _devices(hall: Hall, folder: Path, ports: dict[str, int]) -> Iterator[dict[str, Device]]:
    devices = {name: Device(hall, folder, name, port) for name, port in ports.items()}
    try:
        yield devices
    finally:
        for device in devices.values():
            device.stop()


def test_what_three_devices_fetch_together_is_published_about_once(
    tmp_path: Path, broker: EmbeddedBroker, hall: Hall
) -> None:
    """Each chunk goes out at most once on the shared topic; before they listen, devices get a few of their own."""
    with _devices(hall, tmp_path, dict.fromkeys(NAMES, broker.port)) as devices:
        hall.serve_until(lambda: all(device.has_it for device in devices.values()))
        hall.serve_until(lambda: not hall.listening)
    assert NUM_CHUNKS // 2 <= hall.num_shared <= NUM_CHUNKS
    assert sum(hall.num_own.values()) < NUM_CHUNKS  # without sharing it would be three times as many
    assert hall.sent_back == set()


def test_a_listener_that_stops_reading_neither_stops_the_others_nor_is_cut(
    tmp_path: Path, broker: EmbeddedBroker, hall: Hall
) -> None:
    """c's link stands still while all three listen: a and b get everything, c is told to leave, and gets its rest."""
    with Proxy() as proxy:
        proxy.target = ("127.0.0.1", broker.port)
        ports = {"a": broker.port, "b": broker.port, "c": int(proxy.address.rpartition(":")[2])}
        with _devices(hall, tmp_path, ports) as devices:
            hall.serve_until(lambda: len(hall.listening) == 3)
            proxy.link = Link(stalled="down")
            hall.serve_until(lambda: devices["a"].has_it and devices["b"].has_it)
            assert hall.sent_back == {"c"}
            assert not devices["c"].has_it
            proxy.link = Link()
            hall.serve_until(lambda: devices["c"].has_it and not hall.listening)
            assert (devices["c"].num_connected, devices["c"].lost) == (1, [])
    assert hall.num_own["c"] > 0
