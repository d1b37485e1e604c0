"""A bad network changes no model: cut anywhere, slow, late; messages lost, repeated, swapped, damaged, old, forged.

The clients run in threads of the test, with their real logic and real workers, because a client that has been cut many
times in a row waits up to a minute before it comes again, and a test should not.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import raw_requests
from fleet import DeviceThread, Fleet, Undisturbed, hashes, mlp_run
from hostile import Eavesdropper
from proxy import Link, Proxy

from coordinator import control
from coordinator.requests.commands import Commands
from coordinator.requests.devices import bundle_for, new_device
from coordinator.server.service import Service, ServiceOptions
from coordinator.store.sqlite import SqliteStore
from edge_client.client import identity
from edge_client.client.daemon import ConnectTo
from edge_client.records import to_map
from edge_client.transport.base import OnEvent, parse_broker_url
from edge_client.transport.inproc import Faults, Hub
from edge_client.transport.mqtt import Backoff, MqttTransport

FAST = Backoff(min_s=0.02, max_s=0.1)
HIDDEN = 1024  # a model of 303 kB: three chunks
ROUNDS = 2
SECONDS = 120


def _connect(bundle: identity.Bundle) -> ConnectTo:
    url = parse_broker_url(bundle.brokers[0])
    return lambda on_event, boot: MqttTransport(
        host=url.host,
        port=url.port,
        name=bundle.device,
        password=bundle.password,
        on_event=on_event,
        boot_id=boot,
        backoff=FAST,
    )


@contextlib.contextmanager
def _devices(fleet: Fleet, folder: Path) -> Iterator[list[DeviceThread]]:
    """The devices a and b as threads."""
    names = ("a", "b")
    fleet.add_devices(*names)
    threads = [
        DeviceThread(fleet.bundle(name), folder / name, (index, len(names)), _connect(fleet.bundle(name)))
        for index, name in enumerate(names)
    ]
    try:
        yield threads
    finally:
        for thread in threads:
            thread.stop()


@contextlib.contextmanager
def _federation(folder: Path) -> Iterator[tuple[Fleet, Proxy]]:
    """A coordinator, and two devices behind a proxy."""
    with Proxy() as proxy, Fleet(folder, reroute=proxy.address) as fleet:
        fleet.start_coordinator()
        status = fleet.ask("status")
        assert status is not None
        proxy.target = ("127.0.0.1", parse_broker_url(status["brokers"][0]).port)
        with _devices(fleet, folder):
            yield fleet, proxy


def _finish(fleet: Fleet, rounds: int = ROUNDS) -> list[str]:
    shown = fleet.wait_finished(fleet.start_run(mlp_run(rounds=rounds, model={"hidden": [HIDDEN]})), SECONDS)
    assert shown["state"] == "finished", shown["reason"]
    return hashes(shown)


def test_connections_cut_at_many_bytes_change_no_model(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """48 connections end after 1 byte, inside the handshake, inside chunks, at their edges, and anywhere (seed 7)."""
    rng = random.Random(7)
    offsets = [1, 2, 7, 40, 63, 100, 200, 300, 350, 400, 450, 500, 600, 800, 1000, 1500, 2000, 4096, 8192, 60_000]
    offsets += [122_879, 122_912, 123_500, 130_000, 245_800, 260_000, 303_000, 310_000, 330_000]
    offsets += [rng.randrange(1, 400_000) for _ in range(48 - len(offsets))]
    with _federation(tmp_path) as (fleet, proxy):
        proxy.cuts = iter(offsets)
        proxy.cut_all()
        assert _finish(fleet) == undisturbed.hashes(rounds=ROUNDS, hidden=HIDDEN)
        assert proxy.num_cuts >= len(offsets) - 10  # the last ones may never have carried so much


def test_a_slow_and_late_network_changes_no_model(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """200 ms each way, 400 kB/s, in pieces of 997 bytes, and a moment in which nothing of the devices gets through."""
    with _federation(tmp_path) as (fleet, proxy):
        proxy.link = Link(delay_s=0.2, bytes_per_s=400_000, slice_bytes=997)
        run = fleet.start_run(mlp_run(rounds=ROUNDS, model={"hidden": [HIDDEN]}))
        fleet.wait_until(lambda: len(hashes(fleet.show(run))) == 2, SECONDS, "round 1 is committed")
        proxy.link = Link(stalled="up")
        before = proxy.num_bytes
        fleet.wait_until(lambda: proxy.num_bytes > before, SECONDS, "the coordinator speaks on the stalled connection")
        proxy.link = Link()
        assert hashes(fleet.wait_finished(run, SECONDS)) == undisturbed.hashes(rounds=ROUNDS, hidden=HIDDEN)


def test_old_forged_and_foreign_messages_change_no_model(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Somebody with the broker's own rights repeats, damages, redirects and invents messages both ways (seed 3)."""
    with _federation(tmp_path) as (fleet, _):
        with Eavesdropper(fleet.state_dir, random.Random(3)) as enemy:
            made = _finish(fleet)
        assert made == undisturbed.hashes(rounds=ROUNDS, hidden=HIDDEN)
        assert enemy.num_sent["repeated"] > 20
        assert min(enemy.num_sent.values()) > 0
        assert "Traceback" not in fleet.log("coordinator")


class _Shared:
    """A hub's transport for one of several threads: one lock, and waiting happens outside of it."""

    def __init__(self, lock: threading.RLock, hub: Hub, name: str, on_event: OnEvent) -> None:
        self._lock = lock
        self._inner = hub.transport(name, on_event)

    @property
    def queued_bytes(self) -> int:
        return self._inner.queued_bytes

    def connect(self) -> None:
        with self._lock:
            self._inner.connect()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        with self._lock:
            self._inner.publish(topic, payload, retain=retain)

    def subscribe(self, topics: Sequence[str]) -> None:
        with self._lock:
            self._inner.subscribe(topics)

    def unsubscribe(self, topics: Sequence[str]) -> None:
        with self._lock:
            self._inner.unsubscribe(topics)

    def poll(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> list[int]:
        with self._lock:
            ready = self._inner.poll(0.0, extra_fds)
            busy = self._inner.busy
        if not ready and not busy:
            time.sleep(min(timeout_s, 0.005))
        return ready

    def wake(self) -> None:
        pass

    def drop(self) -> None:
        with self._lock:
            self._inner.drop()

    def close(self) -> None:
        with self._lock:
            self._inner.close()


@pytest.fixture
def _signals() -> Iterator[None]:
    """The service takes SIGTERM and SIGINT; give them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
def test_lost_repeated_swapped_and_damaged_messages_change_no_model(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The real coordinator and clients over a hub that repeats, swaps, loses and damages messages (seed 5)."""
    faults = Faults(drop=0.01, duplicate=0.2, reorder=0.2, corrupt=0.02)
    lock, hub = threading.RLock(), Hub(faults=faults, rng=random.Random(5))
    state_dir = tmp_path / "coordinator"
    state_dir.mkdir()
    store = SqliteStore(state_dir / "state.db")
    rows = [new_device(name) for name in ("a", "b")]
    for row in rows:
        store.devices.add(row)
    service = Service(
        state_dir=state_dir,
        store=store,
        broker=None,
        brokers=("mqtt://hub",),
        ca=None,
        connect=lambda on_event: _Shared(lock, hub, "coordinator", on_event),
        options=ServiceOptions(heartbeat_s=1.0, disk_reserve_bytes=0),
    )
    bundles = [bundle_for(row, federation=service.federation, brokers=("mqtt://hub",), ca=None) for row in rows]
    results: list[list[str]] = []

    def drive() -> None:
        threads = [
            DeviceThread(bundle, tmp_path / bundle.device, (index, 2), _over(lock, hub, bundle.device))
            for index, bundle in enumerate(bundles)
        ]
        try:
            results.append(_follow(state_dir))
        finally:
            for thread in threads:
                thread.stop()
            service.request_stop()

    driver = threading.Thread(target=drive, daemon=True)
    driver.start()
    service.run(Commands(service).handle)
    driver.join(30)
    store.close()
    assert results == [undisturbed.hashes(rounds=ROUNDS, hidden=HIDDEN)]


def _over(lock: threading.RLock, hub: Hub, name: str) -> ConnectTo:
    return lambda on_event, boot: _Shared(lock, hub, name, on_event)


def _follow(state_dir: Path) -> list[str]:
    """Start the run and wait for its end."""
    until = time.monotonic() + SECONDS
    while not control.socket_path(state_dir).exists() and time.monotonic() < until:
        time.sleep(0.02)
    file = to_map(mlp_run(rounds=ROUNDS, model={"hidden": [HIDDEN]}))
    run = raw_requests.request(state_dir, "run-start", file=file)["run"]
    while time.monotonic() < until:
        shown = raw_requests.request(state_dir, "run-show", run=run)
        if shown["state"] == "finished":
            return hashes(shown)
        time.sleep(0.1)
    raise AssertionError(f"the run did not end: {shown}")
