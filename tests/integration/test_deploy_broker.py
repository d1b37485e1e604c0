"""The brokers of `deploy/broker` as they stand, with other ports and paths: mosquitto, and three NATS servers."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from sites import FAST, Client, access_of, find_mosquitto, first_event, pump, settle

from coordinator.broker import access_rules as broker_lines
from coordinator.broker.broker import DeviceAccess, find_binary
from edge_client.transport.base import Connected, Disconnected
from edge_client.transport.mqtt import MqttTransport, tls_context
from edge_client.wire.topics import Topics

pytestmark = pytest.mark.broker

DEPLOY = Path(__file__).parents[2] / "deploy/broker"
TOPICS = Topics("f1")
START_S = 30.0  # only a failing test waits so long


@dataclass(frozen=True, slots=True)
class Servers:
    """Running brokers, and the users that they let in."""

    ports: Sequence[int]
    ca: str
    users: dict[str, DeviceAccess]
    processes: Sequence[subprocess.Popen[bytes]]

    def client(self, name: str, first: int = 0, *, password: str = "", tls: bool = True) -> Client:
        """One that tries the server `first`, then the others."""
        ports = [*self.ports[first:], *self.ports[:first]]
        return Client(
            lambda on_event: MqttTransport(
                host="localhost",
                port=ports[0],
                others=[("localhost", port) for port in ports[1:]],
                name=name,
                password=password or self.users[name].password,
                on_event=on_event,
                tls=tls_context(self.ca) if tls else None,
                backoff=FAST,
                rng=random.Random(7),
            )
        )

    def connected(self, name: str, first: int = 0, topics: tuple[str, ...] = ()) -> Client:
        """One that was let in."""
        client = self.client(name, first)
        client.transport.subscribe(topics)
        client.transport.connect()
        pump(lambda: client.count(Connected) > 0, client)
        return client


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        probes = [opened.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def certificates(folder: Path, *names: str) -> str:
    """As the script makes them."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run([DEPLOY / "make-certificates.sh", folder, *names], check=True, capture_output=True)
    return (folder / "ca.pem").read_text()


def wait_for(ports: Sequence[int], processes: Sequence[subprocess.Popen[bytes]], log: Path) -> None:
    end_s = time.monotonic() + START_S
    for port in ports:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            said = log.read_text() if log.exists() else ""
            assert all(process.poll() is None for process in processes), said
            assert time.monotonic() < end_s, said


@contextlib.contextmanager
def mosquitto(folder: Path) -> Iterator[Servers]:
    """One server, its files with other paths."""
    binary = find_mosquitto()
    if binary is None:
        pytest.skip("mosquitto is not installed")
    ca = certificates(folder, "server")
    (port,) = free_ports(1)
    users = {name: access_of(TOPICS, name) for name in ("coordinator", "d1", "d2")}
    (folder / "passwords").write_text("".join(f"{broker_lines.mosquitto_password(user)}\n" for user in users.values()))
    devices = "\n\n".join(broker_lines.mosquitto_acl(users[name]) for name in ("d1", "d2"))
    (folder / "acl").write_text((DEPLOY / "mosquitto/acl").read_text().replace("FED", "f1") + devices + "\n")
    text = (DEPLOY / "mosquitto/mosquitto.conf").read_text().replace("/etc/mosquitto", str(folder))
    account = "user root\n" if os.geteuid() == 0 else ""  # the files of the test are nobody else's
    (folder / "mosquitto.conf").write_text(text.replace("8883", str(port)) + account)
    for name in ("passwords", "acl"):
        (folder / name).chmod(0o600)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([binary, "-c", folder / "mosquitto.conf"], stdout=log, stderr=log)
    try:
        wait_for([port], [process], folder / "log")
        yield Servers([port], ca, users, [process])
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def nats(folder: Path) -> Iterator[Servers]:
    """Three servers on this machine: their file with other ports, paths and names."""
    names = [f"broker-{number}.example" for number in (1, 2, 3)]
    ca = certificates(folder, *names)
    mqtt, routes = free_ports(6)[:3], free_ports(3)
    users = {name: access_of(TOPICS, name) for name in ("coordinator", "d1", "d2")}
    listed = (DEPLOY / "nats/users.conf").read_text().replace("FED", "f1")
    listed = listed.replace("CHANGE-ME", users["coordinator"].password)
    devices = "\n".join(f"  {broker_lines.nats_user(users[name])}" for name in ("d1", "d2"))
    (folder / "users.conf").write_text(listed.replace("\n]", f"\n{devices}\n]"))
    processes = []
    try:
        for name, port, route in zip(names, mqtt, routes, strict=True):
            text = (DEPLOY / "nats/nats.conf").read_text()
            for number, other in enumerate(names):
                text = text.replace(f"{other}:6222", f"127.0.0.1:{routes[number]}")
            text = text.replace("/etc/nats/server", str(folder / name)).replace("/etc/nats", str(folder))
            text = text.replace("/var/lib/nats", str(folder / f"store-{name}")).replace("port: 4222", "port: -1")
            text = text.replace("port: 6222", f"port: {route}").replace("port: 8883", f"port: {port}")
            (folder / f"{name}.conf").write_text(text)
            with open(folder / "log", "ab") as log:
                processes.append(
                    subprocess.Popen(
                        [find_binary(), "-c", folder / f"{name}.conf"],
                        env={**os.environ, "FEDFIT_NODE": name},
                        stdout=log,
                        stderr=log,
                    )
                )
        wait_for(mqtt, processes, folder / "log")
        yield Servers(mqtt, ca, users, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(
    scope="module", params=[pytest.param(mosquitto, marks=pytest.mark.mosquitto), nats], ids=["mosquitto", "nats"]
)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Each of the two, for all tests."""
    with request.param(tmp_path_factory.mktemp("broker")) as running:
        yield running


def test_a_device_and_the_coordinator_hear_each_other_over_tls(servers: Servers) -> None:
    """On different servers, where there are several; a whole chunk passes.

    A cluster tells its other servers of a subscription a moment after it has confirmed it, so both say it again.
    """
    last = len(servers.ports) - 1
    coordinator = servers.connected("coordinator", 0, TOPICS.coordinator_subscribes())
    device = servers.connected("d1", last, TOPICS.device_subscribes("d1"))
    chunk = bytes(128 << 10)
    again_s = 0.0

    def heard() -> bool:
        nonlocal again_s
        if time.monotonic() >= again_s:
            again_s = time.monotonic() + 1.0
            if not coordinator.received:
                device.transport.publish(TOPICS.device("d1", "data"), chunk)
            if not device.received:
                coordinator.transport.publish(TOPICS.device("d1", "cmd"), b"assign")
        return bool(coordinator.received and device.received)

    pump(heard, coordinator, device)
    assert {*coordinator.received} == {(TOPICS.device("d1", "data"), chunk)}
    assert {*device.received} == {(TOPICS.device("d1", "cmd"), b"assign")}


def test_a_device_reaches_only_its_own_topics(servers: Servers) -> None:
    """What it publishes elsewhere is heard by nobody; what it may not hear it does not get."""
    coordinator = servers.connected("coordinator", 0, TOPICS.coordinator_subscribes())
    other = servers.connected("d2", 0, TOPICS.device_subscribes("d2"))
    device = servers.connected("d1")
    for topic in (TOPICS.device("d2", "up"), TOPICS.device("d2", "cmd"), TOPICS.coordinator_state):
        device.transport.publish(topic, b"forged")
    device.transport.publish(TOPICS.device("d1", "up"), b"mine")
    pump(lambda: bool(coordinator.received), coordinator, other, device)
    assert coordinator.received == [(TOPICS.device("d1", "up"), b"mine")]
    curious = servers.client("d1")
    curious.transport.subscribe((TOPICS.device("d2", "cmd"),))
    curious.transport.connect()
    pump(lambda: bool(curious.events), curious)
    coordinator.transport.publish(TOPICS.device("d2", "cmd"), b"for d2 alone")
    pump(lambda: (TOPICS.device("d2", "cmd"), b"for d2 alone") in other.received, coordinator, other, curious)
    settle(curious)
    assert curious.received == []


def test_strangers_stay_out(servers: Servers) -> None:
    """A wrong password, another's password, no encryption."""
    for client, code in (
        (servers.client("d1", password="x" * 20), "credentials"),
        (servers.client("d1", password=servers.users["d2"].password), "credentials"),
        (servers.client("d1", tls=False), None),
    ):
        client.transport.connect()
        event = first_event(client)
        assert isinstance(event, Disconnected)
        assert code is None or event.code == code
        client.transport.close()


def test_a_client_goes_on_when_its_server_was_killed(servers: Servers) -> None:
    """The last test of each: it kills one of three."""
    if len(servers.ports) == 1:
        pytest.skip("one server has no other")
    coordinator = servers.connected("coordinator", 0, TOPICS.coordinator_subscribes())
    device = servers.connected("d1", 2)
    servers.processes[2].kill()
    pump(lambda: device.count(Connected) == 2, device, coordinator)
    device.transport.publish(TOPICS.device("d1", "up"), b"still here")
    pump(lambda: bool(coordinator.received), device, coordinator)
    assert coordinator.received == [(TOPICS.device("d1", "up"), b"still here")]
