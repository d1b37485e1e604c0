"""mosquitto and NATS accept the lines for external brokers exactly as they are printed."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import BrokerSite, access_of, connected, find_mosquitto, pump, settle

from coordinator.broker import access_rules
from coordinator.broker.broker import find_binary
from edge_client.transport.base import Disconnected
from edge_client.wire.topics import Topics

TOPICS = Topics("f1")
USER = access_of(TOPICS, "d1")
COORDINATOR = access_of(TOPICS, "coordinator")


def test_the_password_is_hashed_as_mosquitto_does() -> None:
    """`$7$iterations$salt$hash`: PBKDF2 with SHA-512, computed here from the line alone; each salt is new."""
    name, _, rest = access_rules.mosquitto_password(USER).partition(":")
    _, kind, iterations, salt, digest = rest.split("$")
    expected = hashlib.pbkdf2_hmac("sha512", USER.password.encode(), base64.b64decode(salt), int(iterations))
    assert (name, kind, base64.b64decode(digest)) == ("d1", "7", expected)
    assert USER.password not in rest
    assert access_rules.mosquitto_password(USER) != f"{name}:{rest}"


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[BrokerSite]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
        assert process.poll() is None
        yield BrokerSite("127.0.0.1", port, TOPICS, {user.name: user.password for user in (USER, COORDINATOR)})
    finally:
        process.terminate()
        process.wait()


def _assert_exactly_its_topics(site: BrokerSite) -> None:
    """The device publishes and receives on its topics only, and nobody connects with another password."""
    device, coordinator = connected(site, "d1", USER.subscribe), connected(site, "coordinator", (TOPICS.everything,))
    for topic in (TOPICS.device("d2", "up"), TOPICS.coordinator_state, *USER.publish):
        device.transport.publish(topic, topic.encode())
    pump(lambda: len(coordinator.received) >= len(USER.publish), device, coordinator)
    assert [topic for topic, _ in coordinator.received] == list(USER.publish)
    for topic in USER.subscribe:
        coordinator.transport.publish(topic, topic.encode())
    pump(lambda: len(device.received) >= len(USER.subscribe), device, coordinator)
    assert [topic for topic, _ in device.received] == list(USER.subscribe)
    stranger = site.make("d1", password="x" * 43)
    stranger.transport.connect()
    pump(lambda: bool(stranger.events), stranger)
    assert isinstance(stranger.events[0], Disconnected)
    assert stranger.events[0].code == "credentials"


@pytest.mark.mosquitto
def test_mosquitto_accepts_the_commands_as_they_are_printed(tmp_path: Path) -> None:
    """A device is added, then replaced: only its second password is accepted."""
    binary = find_mosquitto()
    if binary is None or shutil.which("mosquitto_passwd") is None:
        pytest.skip("mosquitto is not installed")
    older = access_of(TOPICS, "d1")
    for commands in (
        access_rules.mosquitto_commands(COORDINATOR, replace=False),
        access_rules.mosquitto_commands(older, replace=False),
        access_rules.mosquitto_commands(USER, replace=True),
    ):
        subprocess.run(["sh", "-e", "-c", commands], cwd=tmp_path, check=True)
    assert (tmp_path / "passwords").read_text().count("d1:") == 1
    port = _port()
    account = "root" if os.getuid() == 0 else "mosquitto"
    for name in ("passwords", "acl"):
        (tmp_path / name).chmod(0o600)
    (tmp_path / "conf").write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous false\nuser {account}\npassword_file {tmp_path}/passwords\n"
        f"acl_file {tmp_path}/acl\npersistence false\nlog_dest none\n"
    )
    with _running([binary, "-c", str(tmp_path / "conf")], port) as site:
        _assert_exactly_its_topics(site)
        spy, coordinator = connected(site, "d1", (TOPICS.device("d2", "cmd"),)), connected(site, "coordinator")
        for device in ("d2", "d1"):  # mosquitto accepts any subscription, and delivers nothing
            coordinator.transport.publish(TOPICS.device(device, "cmd"), b"x")
        spy.transport.subscribe((TOPICS.device("d1", "cmd"),))
        settle(spy, coordinator)
        coordinator.transport.publish(TOPICS.device("d1", "cmd"), b"y")
        pump(lambda: (TOPICS.device("d1", "cmd"), b"y") in spy.received, spy, coordinator)
        assert TOPICS.device("d2", "cmd") not in dict(spy.received)


@pytest.mark.broker
def test_a_nats_server_accepts_the_user_as_it_is_printed(tmp_path: Path) -> None:
    """The rest of the configuration is the smallest one with MQTT."""
    port = _port()
    (tmp_path / "nats.conf").write_text(
        f"server_name: other\nhost: 127.0.0.1\nport: -1\njetstream {{ store_dir: {tmp_path}/store }}\n"
        f"mqtt {{ host: 127.0.0.1, port: {port} }}\n"
        f"authorization {{ users: [\n{access_rules.nats_user(USER)}\n{access_rules.nats_user(COORDINATOR)}\n] }}\n"
    )
    with _running([str(find_binary()), "-c", str(tmp_path / "nats.conf")], port) as site:
        _assert_exactly_its_topics(site)
        spy = site.make("d1")
        spy.transport.subscribe((TOPICS.device("d2", "cmd"),))
        spy.transport.connect()
        pump(lambda: bool(spy.events), spy)
        assert isinstance(spy.events[0], Disconnected)
        assert spy.events[0].code == "subscription"
