"""The embedded broker as a process: who may do what, reload, death, orphans, ports."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from sites import BrokerSite, Client, access_of, connected, first_event, pump, settle

from coordinator.broker.broker import DeviceAccess, EmbeddedBroker, TlsFiles, new_password
from coordinator.broker.certificates import ensure_pki
from edge_client.errors import MachineError
from edge_client.transport.base import Connected, Disconnected
from edge_client.transport.mqtt import Backoff, MqttTransport, tls_context
from edge_client.wire.topics import Topics

pytestmark = pytest.mark.broker

TOPICS = Topics("f1")
CHANNELS = [TOPICS.device(name, channel) for name in ("d1", "d2") for channel in ("state", "up", "data", "cmd", "down")]
COMMON = [TOPICS.announcement, TOPICS.shared_down, TOPICS.coordinator_state]
OTHERS = [*COMMON, "fl/v1/f1", "fl/v1/f1/dev/d1", "fl/v1/f2/dev/d1/up", "elsewhere"]
WILDCARDS = ["fl/v1/f1/#", "fl/v1/f1/dev/+/up", "fl/v1/f1/dev/d1/#", "#", "+/v1/f1/all/round"]


def may(name: str, what: str, topic: str) -> bool:
    """The table of design: a device has its own five topics and hears three common ones, the coordinator has all."""
    if name == "coordinator":
        return topic == "fl/v1/f1" or topic.startswith("fl/v1/f1/")
    channels = ("state", "up", "data") if what == "publish" else ("cmd", "down")
    own = {f"fl/v1/f1/dev/{name}/{channel}" for channel in channels}
    common = ("fl/v1/f1/all/round", "fl/v1/f1/all/down", "fl/v1/f1/coord/state")
    return topic in own or (what == "subscribe" and topic in common)


@pytest.mark.parametrize("name", ["coordinator", "d1", "d2"])
def test_subscriptions_follow_the_table(broker_site: BrokerSite, name: str) -> None:
    """Every role and topic: accepted, or refused as a subscription; a device gets no wildcard at all."""
    allowed = {}
    for topic in CHANNELS + OTHERS + WILDCARDS:
        client = broker_site.make(name)
        client.transport.subscribe((topic,))
        client.transport.connect()
        event = first_event(client)
        assert isinstance(event, Connected) or (isinstance(event, Disconnected) and event.code == "subscription")
        allowed[topic] = isinstance(event, Connected)
        client.transport.close()
    assert allowed == {topic: may(name, "subscribe", topic) for topic in CHANNELS + OTHERS + WILDCARDS}


@pytest.mark.parametrize("name", ["coordinator", "d1", "d2"])
@pytest.mark.parametrize("retain", [False, True])
def test_publications_follow_the_table(embedded: EmbeddedBroker, name: str, retain: bool) -> None:
    """Every role and topic, heard by a user who may hear everything; retained ones make no difference."""
    auditor = DeviceAccess(
        name="auditor", password=new_password(), publish=(), subscribe=(*OTHERS, *CHANNELS, "fl/v1/f1/#")
    )
    embedded.set_devices([*embedded.users[1:], auditor])
    site = BrokerSite("127.0.0.1", embedded.port, TOPICS, {user.name: user.password for user in embedded.users})
    listener = connected(site, "auditor", ("fl/v1/f1/#", "fl/v1/f2/dev/d1/up", "elsewhere"))
    speaker = connected(site, name)
    for topic in CHANNELS + OTHERS:
        speaker.transport.publish(topic, topic.encode(), retain=retain)
    marker = TOPICS.coordinator_state if name == "coordinator" else TOPICS.device(name, "up")
    speaker.transport.publish(marker, b"the end")
    pump(lambda: (marker, b"the end") in listener.received, listener, speaker)
    heard = {topic for topic, payload in listener.received if payload != b"the end"}
    assert heard == {topic for topic in CHANNELS + OTHERS if may(name, "publish", topic)}
    assert speaker.count(Disconnected) == 0


def test_two_devices_cannot_take_each_others_place(broker_site: BrokerSite) -> None:
    """d2 with its own password but d1's name is refused; and d1, with its new connection, does not cut its old one."""
    first = connected(broker_site, "d1")
    liar = broker_site.make("d1", password=broker_site.passwords["d2"])
    liar.transport.connect()
    pump(lambda: bool(liar.events), liar)
    second = connected(broker_site, "d1")
    settle(first, second)
    assert isinstance(liar.events[0], Disconnected)
    assert liar.events[0].code == "credentials"
    assert first.events == second.events == [Connected()]


def test_nobody_gets_in_without_a_password(embedded: EmbeddedBroker) -> None:
    """An anonymous connection is refused."""
    stranger = BrokerSite("127.0.0.1", embedded.port, TOPICS, {"d1": None}).make("d1")
    stranger.transport.connect()
    pump(lambda: bool(stranger.events), stranger)
    assert isinstance(stranger.events[0], Disconnected)
    assert stranger.events[0].code == "credentials"


def test_a_new_device_cuts_nobody_and_gets_in_at_once(embedded: EmbeddedBroker, broker_site: BrokerSite) -> None:
    """The first attempt after `set_devices` succeeds."""
    others = [connected(broker_site, "coordinator"), connected(broker_site, "d1"), connected(broker_site, "d2")]
    new = access_of(TOPICS, "d3")
    embedded.set_devices([*embedded.users[1:], new])
    broker_site.passwords["d3"] = new.password
    device = connected(broker_site, "d3", new.subscribe)
    settle(*others)
    assert device.events == [Connected()]
    assert [client.events for client in others] == [[Connected()]] * 3


def test_a_removed_device_is_cut_and_stays_out(embedded: EmbeddedBroker, broker_site: BrokerSite) -> None:
    """So is one whose password changed; the coordinator stays."""
    first, second, coordinator = (connected(broker_site, name) for name in ("d1", "d2", "coordinator"))
    embedded.set_devices([replace(embedded.users[1], password=new_password())])
    pump(lambda: all(c.count(Disconnected) >= 2 for c in (first, second)), first, second, coordinator)
    for client in (first, second):
        _, cut, refused = client.events[:3]
        assert isinstance(cut, Disconnected)
        assert isinstance(refused, Disconnected)
        assert refused.code == "credentials"
    assert coordinator.events == [Connected()]


def test_killed_it_is_started_again_on_its_port_and_clients_come_back(
    embedded: EmbeddedBroker, broker_site: BrokerSite
) -> None:
    """kill -9, ensure, and messages flow between the same clients."""
    up, port = TOPICS.device("d1", "up"), embedded.port
    listener, device = connected(broker_site, "coordinator", (up,)), connected(broker_site, "d1")
    assert embedded.ensure() is False
    os.kill(int(embedded.pid_file.read_text()), signal.SIGKILL)
    pump(lambda: not embedded.alive(), listener, device)
    assert embedded.ensure() is True
    assert embedded.port == port
    pump(lambda: listener.count(Connected) == device.count(Connected) == 2, listener, device)
    device.transport.publish(up, b"back")
    pump(lambda: bool(listener.received), listener, device)
    assert listener.received == [(up, b"back")]


def test_more_devices_than_it_has_memory_for_get_a_new_process_on_the_same_port(
    embedded: EmbeddedBroker, broker_site: BrokerSite
) -> None:
    """Up to 3,000 devices its limit is 256 MiB; for 3,001 it is 64 + 0.08 * 3,752, rounded up, and all come back."""
    coordinator, device = connected(broker_site, "coordinator"), connected(broker_site, "d1")
    process, port = int(embedded.pid_file.read_text()), embedded.port
    assert psutil.Process(process).environ()["GOMEMLIMIT"] == "256MiB"
    many = [access_of(TOPICS, f"n{i}") for i in range(3001 - len(embedded.users[1:]))]
    embedded.set_devices([*embedded.users[1:], *many])
    successor = psutil.Process(int(embedded.pid_file.read_text()))
    assert successor.pid != process
    assert embedded.port == port
    assert successor.environ()["GOMEMLIMIT"] == "365MiB"
    pump(lambda: all(client.count(Connected) == 2 for client in (coordinator, device)), coordinator, device)


def test_secrets_are_readable_by_the_owner_only(embedded: EmbeddedBroker) -> None:
    """Directory 0700, every file 0600; the passwords stand in one of them."""
    directory = embedded.pid_file.parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir() if path.is_file()}
    assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}
    assert {"nats.conf", "nats.log"} <= set(modes)


def test_it_listens_where_it_was_told_and_nowhere_else(embedded: EmbeddedBroker) -> None:
    """The MQTT port, and NATS' own on loopback; no 0.0.0.0."""
    process = psutil.Process(int(embedded.pid_file.read_text()))
    listening = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert embedded.port in {address.port for address in listening}


SERVE = """
import sys
from pathlib import Path
from coordinator.broker.broker import DeviceAccess, EmbeddedBroker, new_password
user = DeviceAccess(name="coordinator", password=new_password(), publish=("t",), subscribe=("t",))
broker = EmbeddedBroker(Path(sys.argv[1]), coordinator=user)
broker.start()
print(broker.pid_file.read_text().strip(), flush=True)
sys.stdin.read()
"""


def test_it_dies_with_its_coordinator(tmp_path: Path) -> None:
    """SIGKILL for the parent leaves no broker behind."""
    parent = subprocess.Popen(
        [sys.executable, "-c", SERVE, tmp_path / "broker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    broker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    broker.wait(10)
    parent.stdout.close()
    parent.stdin.close()
    assert not broker.is_running()


def user(name: str = "coordinator") -> DeviceAccess:
    return DeviceAccess(name=name, password=new_password(), publish=("t",), subscribe=("t",))


def test_an_orphan_on_the_same_store_is_ended_first(tmp_path: Path) -> None:
    """A second object on the directory stands for a coordinator that came back; the first server must go."""
    first = EmbeddedBroker(tmp_path / "broker", coordinator=user())
    first.start()
    second = EmbeddedBroker(tmp_path / "broker", coordinator=user())
    second.start()
    assert not first.alive()
    assert second.alive()
    second.stop()


def test_a_foreign_process_with_the_old_number_is_left_alone(tmp_path: Path) -> None:
    """Process ids are used again; this one is not ours."""
    broker = EmbeddedBroker(tmp_path / "broker", coordinator=user())
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    broker.pid_file.parent.mkdir()
    broker.pid_file.write_text(f"{bystander.pid}\n")
    broker.start()
    assert bystander.poll() is None
    broker.stop()
    bystander.communicate(b"\n")
    assert not broker.pid_file.exists()


def test_a_store_that_does_not_open_is_thrown_away(tmp_path: Path) -> None:
    """A file where the store's directory should be; everything in it would be published again anyway."""
    broker = EmbeddedBroker(tmp_path / "broker", coordinator=user())
    broker.pid_file.parent.mkdir()
    (tmp_path / "broker" / "store").mkdir()
    (tmp_path / "broker" / "store" / "jetstream").write_text("not a directory")
    broker.start()
    assert broker.alive()
    broker.stop()


def test_a_busy_port_is_named_with_its_holder(tmp_path: Path) -> None:
    """What to do stands in the message."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        broker = EmbeddedBroker(tmp_path / "broker", coordinator=user(), port=port)
        expected = rf"port {port} on 127\.0\.0\.1 is already in use \(by .*, process {os.getpid()}\); stop it or"
        with pytest.raises(MachineError, match=expected):
            broker.start()
    assert not broker.alive()


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    """192.0.2.1 is for documentation (RFC 5737); no machine has it."""
    broker = EmbeddedBroker(tmp_path / "broker", coordinator=user(), host="192.0.2.1", port=18831)
    with pytest.raises(MachineError, match=r"cannot listen on 192\.0\.2\.1:18831"):
        broker.start()


def test_it_is_started_from_the_main_thread_only(tmp_path: Path) -> None:
    """It would die with the thread; that is a bug of the caller."""
    broker = EmbeddedBroker(tmp_path / "broker", coordinator=user())
    caught: list[BaseException] = []

    def run() -> None:
        try:
            broker.start()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert not broker.alive()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 'd1" }'},
        {"password": "short"},
        {"password": "$2a$11$0123456789abcdef"},
        {"publish": ('a"b',)},
        {"subscribe": ("a.b",)},
    ],
)
def test_nothing_can_be_smuggled_into_the_configuration(changes: dict[str, object]) -> None:
    """Names, passwords and topics with NATS' own characters."""
    with pytest.raises(ValueError, match=r"^user "):
        replace(user(), **changes)  # type: ignore[arg-type]


def test_tls_serves_clients_with_our_authority_only(tmp_path: Path) -> None:
    """The whole path: CA, broker, client."""
    pki = ensure_pki(tmp_path / "pki", ["localhost", "127.0.0.1"])
    stranger = ensure_pki(tmp_path / "other", ["localhost"])
    coordinator = user()
    files = TlsFiles(certificate=pki.server_certificate, key=pki.server_key)
    broker = EmbeddedBroker(tmp_path / "broker", coordinator=coordinator, tls=files)
    broker.start()

    def client(ca_pem: str) -> Client:
        made = Client(
            lambda on_event: MqttTransport(
                host="localhost",
                port=broker.port,
                name="coordinator",
                password=coordinator.password,
                tls=tls_context(ca_pem),
                on_event=on_event,
                backoff=Backoff(min_s=60),
            )
        )
        made.transport.subscribe(("t",))
        made.transport.connect()
        pump(lambda: bool(made.events), made)
        return made

    good, bad = client(pki.ca_pem), client(stranger.ca_pem)
    payloads = [bytes([i]) * 122_912 for i in range(40)]
    for payload in payloads:
        good.transport.publish("t", payload)
    pump(lambda: len(good.received) == 40, good)
    broker.stop()
    assert [payload for _, payload in good.received] == payloads
    assert isinstance(bad.events[0], Disconnected)
    assert bad.events[0].code == "refused"
