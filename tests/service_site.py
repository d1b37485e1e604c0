"""A coordinator's service on a hub in memory, driven by hand, with two devices that speak the real wire."""

from __future__ import annotations

import contextlib
import hashlib
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rows import (
    PROFILE,
    device_row,
    lease_row,
    model_row,
    round_row,
    run_file,
    run_row,
    update_row,
)

from coordinator.broker.broker import DeviceAccess, EmbeddedBroker, new_password
from coordinator.server.service import Service, ServiceOptions
from coordinator.store.sqlite import SqliteStore
from edge_client.transport.blobs import BlobStore
from edge_client.transport.inproc import Hub
from edge_client.wire.messages import (
    Hello,
    Message,
    context_down,
    context_up,
    open_message,
    seal_message,
)

CHILD = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "ok": False, "code": "not_finite", "detail": "no"}), flush=True)
"""


class Site:
    """A service on a hub in memory, and the devices a and b, which speak the real wire."""

    def __init__(self, folder: Path, reserve: int = 0) -> None:
        self.folder, self.reserve = folder, reserve
        self.hub = Hub()
        self.store = SqliteStore()
        if not self.store.devices.all():
            passwords = {"a": new_password(), "b": new_password()}
            self.store.devices.add(*(device_row(name, password=passwords[name]) for name in passwords))
        everything = ("fl/#",)
        access = DeviceAccess(name="coordinator", password=new_password(), publish=everything, subscribe=everything)
        self.broker = EmbeddedBroker(folder / "broker", coordinator=access)  # never started: it only knows its users
        self.blobs = BlobStore(folder / "blobs", folder / "tmp")
        self.sessions: dict[str, str] = {}
        self.seq = 0
        self.said: list[tuple[str, bytes]] = []

    @contextlib.contextmanager
    def serving(self) -> Iterator[Service]:
        service = Service(
            state_dir=self.folder,
            store=self.store,
            broker=self.broker,
            brokers=("mqtt://hub",),
            ca=None,
            connect=lambda on_event: self.hub.transport("coordinator", on_event),
            options=ServiceOptions(disk_reserve_bytes=self.reserve),
        )
        with contextlib.ExitStack() as opened:
            opened.callback(service._aggregation.close)
            service.begin(opened)
            self.service = service
            yield service

    def receive(self, device: str, channel: str, payload: bytes, now: float = 0.0) -> None:
        self.service.router.receive(self.service.topics.device(device, channel), payload, now)

    def say(self, device: str, message: Message, now: float = 0.0) -> None:
        self.seq += 1
        key, context = bytes.fromhex(device_row(device).key), context_up(self.service.federation, device)
        session = self.sessions.get(device, "")
        self.receive(device, "up", seal_message(message, session=session, seq=self.seq, key=key, context=context), now)

    def try_hello(self, device: str, now: float) -> None:
        self.say(device, Hello(boot="boot", hello=1, profile=PROFILE, labels={}, free_bytes=5, client="c\x1b[2J"), now)

    def hello(self, device: str, now: float = 0.0) -> None:
        self.try_hello(device, now)
        present = self.service.roster.presence(device)
        assert present is not None
        self.sessions[device] = present.session

    def users(self) -> set[str]:
        return {user.name for user in self.broker.users}

    def leases(self) -> dict[str, tuple[str, str]]:
        return {lease.device: (lease.state, lease.code) for lease in self.store.leases.of_attempt("r-1", 1, 1)}


def with_run(site: Site, *, state: str = "RUNNING", sha256: str | None = None, **evaluate: Any) -> None:
    """A run in round 1: a's update is stored, b's lease is accepted; all blobs are there."""
    model, settings, update = b"model", b"settings", b"update of a"
    names = [hashlib.sha256(data).hexdigest() for data in (model, settings, update)]
    for data, name in zip((model, settings, update), names, strict=True):
        site.blobs.write(data, name, point="test")
    file = run_file(devices={"min": 1}, rounds={"deadline": "60s"}, evaluate={"every": 0} | evaluate)
    site.store.runs.add(run_row("r-1", file))
    site.store.runs.start(model_row(0, sha256=names[0], sent_sha256=names[0]), names[1], len(settings))
    leases = [lease_row(1, "a", state="accepted"), lease_row(2, "b", state="accepted")]
    site.store.rounds.open(round_row(goal=2, quorum=1), leases)
    site.store.updates.save(update_row("a", "lease-1", sha256=sha256 or names[2]), None, "lease-1")
    if state == "FROZEN":
        site.store.leases.set_state("lease-2", "expired", code="late")
        site.store.rounds.freeze("r-1", 1, 1, "hash")


def damage(site: Site, data: bytes, how: str) -> None:
    path = site.blobs.path(hashlib.sha256(data).hexdigest())
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] + b"x")


def read_until(service: Service, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        assert service._aggregation.fd is not None
        select.select([service._aggregation.fd], [], [], 1)
        service._aggregation.read(0.0)


def answers(site: Site, device: str, hear: list[bytes]) -> list[Message]:
    key, context = bytes.fromhex(device_row(device).key), context_down(site.service.federation, device)
    return [open_message(payload, key=key, context=context).message for payload in hear]
