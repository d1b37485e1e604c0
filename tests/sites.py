"""Brokers and clients that tests share; the fixtures are in `conftest.py`."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from coordinator.broker.broker import DeviceAccess, new_password
from edge_client.transport.base import Connected, Event, Received, Transport, Will, parse_broker_url
from edge_client.transport.inproc import Hub, matches
from edge_client.transport.mqtt import Backoff, MqttTransport
from edge_client.wire.topics import Topics

DEADLINE_S = 20.0  # only a failing test ever waits so long
FAST = Backoff(min_s=0.02, max_s=0.1)

_open: list[Client] = []


class Client:
    """A transport and everything it said."""

    def __init__(self, make: Callable[[Callable[[Event], None]], Transport]) -> None:
        self.events: list[Event] = []
        self.transport = make(self.events.append)
        _open.append(self)

    @property
    def received(self) -> list[tuple[str, bytes]]:
        """Topic and payload of all messages so far."""
        return [(event.topic, event.payload) for event in self.events if isinstance(event, Received)]

    def count(self, kind: type) -> int:
        """How many events of a kind came."""
        return sum(isinstance(event, kind) for event in self.events)


def pump(done: Callable[[], bool], *clients: Client) -> None:
    """Let clients work until `done`; fails the test if that never happens."""
    end_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < end_s, f"did not happen; events: {[client.events[-5:] for client in clients]}"
        for client in clients:
            client.transport.poll(0.005)


def first_event(client: Client) -> Event:
    """What a client reports first."""
    pump(lambda: bool(client.events), client)
    return client.events[0]


def close_all() -> None:
    """End every client of the test."""
    while _open:
        _open.pop().transport.close()


def settle(*clients: Client, turns: int = 20) -> None:
    """Let clients work for a moment, for tests that something does not happen."""
    for _ in range(turns):
        for client in clients:
            client.transport.poll(0.005)


class Site(Protocol):
    """A broker with the users `coordinator`, `d1` and `d2`, each with the topics of `wire.topics`."""

    topics: Topics

    def make(self, name: str, *, will: Will | None = None, password: str | None = None) -> Client:
        """A client that has not connected yet."""


def access_of(topics: Topics, name: str) -> DeviceAccess:
    """The permissions that production gives to a device, or to the coordinator."""
    if name == "coordinator":
        everything = (f"fl/v1/{topics.federation}/#",)
        return DeviceAccess(name=name, password=new_password(), publish=everything, subscribe=everything)
    return DeviceAccess(
        name=name,
        password=new_password(),
        publish=topics.device_publishes(name),
        subscribe=topics.device_may_subscribe(name),
    )


class HubSite:
    """The hub in memory."""

    def __init__(self) -> None:
        self.topics = Topics("f1")
        self._users = {name: access_of(self.topics, name) for name in ("coordinator", "d1", "d2")}
        self._hub = Hub(allowed=self._allowed)

    def _allowed(self, user: str, what: str, topic: str) -> bool:
        access = self._users[user]
        mine = access.publish if what == "publish" else access.subscribe
        return any(pattern == topic or matches(pattern, topic) for pattern in mine)

    def make(self, name: str, *, will: Will | None = None, password: str | None = None) -> Client:
        return Client(lambda on_event: self._hub.transport(name, on_event, will=will))


class BrokerSite:
    """A broker on a port of this machine, or anywhere."""

    username: str | None = None  # by default every client is the user of its name

    def __init__(self, host: str, port: int, topics: Topics, passwords: Mapping[str, str | None]) -> None:
        self.host, self.port, self.topics = host, port, topics
        self.passwords = dict(passwords)

    def make(self, name: str, *, will: Will | None = None, password: str | None = None) -> Client:
        return Client(
            lambda on_event: MqttTransport(
                host=self.host,
                port=self.port,
                name=name,
                username=self.username,
                password=password or self.passwords[name],
                on_event=on_event,
                will=will,
                backoff=FAST,
                rng=random.Random(7),
            )
        )


class ExternalSite(BrokerSite):
    """The broker that FEDFIT_TEST_BROKER names; all clients are its one user, and topics are new every time."""

    def __init__(self, url: str) -> None:
        broker = parse_broker_url(url)
        self.username = broker.username
        names = dict.fromkeys(("coordinator", "d1", "d2"), broker.password)
        super().__init__(broker.host, broker.port, Topics(f"test-{secrets.token_hex(6)}"), names)


def find_mosquitto() -> str | None:
    """The broker's executable; Debian keeps it outside the PATH of ordinary users."""
    return shutil.which("mosquitto") or shutil.which("/usr/sbin/mosquitto")


def mosquitto_config(directory: Path, port: int, users: list[DeviceAccess]) -> Path:
    """Write a configuration with a password file and exact topics per user."""
    passwords = directory / "passwords"
    passwords.touch(mode=0o600)
    for user in users:
        command = ["mosquitto_passwd", "-b", str(passwords), user.name, user.password]
        subprocess.run(command, check=True, capture_output=True)
    acl = []
    for user in users:
        acl += [f"user {user.name}", *(f"topic write {topic}" for topic in user.publish)]
        acl += [f"topic read {topic}" for topic in user.subscribe]
    (directory / "acl").write_text("\n".join(acl) + "\n")
    (directory / "acl").chmod(0o600)
    config = directory / "mosquitto.conf"
    account = "root" if os.getuid() == 0 else "mosquitto"  # without root's rights it cannot read these files
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous false\nuser {account}\npassword_file {passwords}\n"
        f"acl_file {directory / 'acl'}\npersistence false\nlog_dest none\n"
    )
    return config


def connected(site: Site, name: str, topics: tuple[str, ...] = (), will: Will | None = None) -> Client:
    """A client that is connected and subscribed."""
    client = site.make(name, will=will)
    client.transport.subscribe(topics)
    client.transport.connect()
    pump(lambda: client.count(Connected) > 0, client)
    return client
