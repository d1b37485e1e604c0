"""A device and the brokers of its bundle: one try when it joins, all of them in turn when it runs; on real brokers."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Fleet
from proxy import Proxy
from sites import FAST, BrokerSite, Client, pump
from typed import typed

from coordinator.broker.certificates import ensure_pki
from edge_client.client import connection, identity
from edge_client.errors import InputError, NetworkError
from edge_client.records import from_map, to_map
from edge_client.transport.base import Connected, Disconnected
from edge_client.transport.mqtt import Backoff, MqttTransport


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator whose broker speaks TLS, and two devices that have not joined."""
    with Fleet(tmp_path_factory.mktemp("connection"), start_options=("--tls",)) as fleet:
        fleet.start_coordinator()
        fleet.add_devices("d", "e")
        yield fleet


def _nowhere(scheme: str = "mqtts") -> str:
    """A port on which nobody listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return f"{scheme}://127.0.0.1:{closed.getsockname()[1]}"


def _changed(bundle: identity.Bundle, **fields: object) -> identity.Bundle:
    return from_map(identity.Bundle, {**to_map(bundle), **fields})


def _join(folder: Path, bundle: identity.Bundle, *options: str) -> subprocess.CompletedProcess[str]:
    """As a person types it, into `folder/state`."""
    identity.write_bundle(folder / "d.join", bundle)
    return typed("edge_client", "join", folder / "d.join", "--state-dir", folder / "state", *options)


def _assert_refused(result: subprocess.CompletedProcess[str], folder: Path, *parts: str) -> None:
    """5, one line, nothing stored."""
    assert (result.returncode, result.stdout) == (5, ""), result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("edge-client: ")
    assert [part for part in (*parts, "nothing was stored") if part not in line] == [], line
    assert not (folder / "state").exists()


def test_a_join_without_a_broker_stores_nothing_unless_told_to(fleet: Fleet, tmp_path: Path) -> None:
    """Each address with its reason; the server may come up later."""
    first, second = _nowhere(), _nowhere()
    bundle = _changed(fleet.bundle("d"), brokers=[first, second])
    places = [f"cannot reach {url.partition('://')[2]}: Connection refused" for url in (first, second)]
    _assert_refused(_join(tmp_path, bundle), tmp_path, *places, "is the coordinator running", "--no-check")
    assert _join(tmp_path, bundle, "--no-check").returncode == 0
    assert identity.load_identity(tmp_path / "state") == bundle


def test_a_join_with_a_wrong_password_stores_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """As after the device was removed."""
    bundle = _changed(fleet.bundle("d"), password="x" * 43)
    _assert_refused(_join(tmp_path, bundle), tmp_path, "'d'", "password", "coordinator device add")


def test_a_join_with_another_federations_authority_stores_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """The password never travels: the handshake fails before it."""
    bundle = _changed(fleet.bundle("d"), ca=ensure_pki(tmp_path / "pki", ["127.0.0.1"]).ca_pem)
    _assert_refused(_join(tmp_path, bundle), tmp_path, "certificate of 127.0.0.1:", "coordinator device add")


def test_one_broker_that_lets_us_in_is_enough(fleet: Fleet, tmp_path: Path) -> None:
    """The first is dead, the second is not; the daemon that starts then finds it, too."""
    bundle = _changed(fleet.bundle("e"), brokers=[_nowhere(), *fleet.bundle("e").brokers])
    assert _join(tmp_path, bundle).returncode == 0
    fleet.replace_bundle(bundle)
    fleet.start_device("e")
    fleet.wait_until(lambda: "the coordinator let us in" in fleet.log("e"), 60, "the second broker is used")
    assert fleet.log("e").index("Connection refused") < fleet.log("e").index("connected to the broker")
    assert fleet.stop("e") == 0


def test_a_device_that_every_broker_refuses_ends_with_5(fleet: Fleet, tmp_path: Path) -> None:
    """Two names of one broker: both are asked before the device gives up."""
    (broker,) = fleet.bundle("d").brokers
    bundle = _changed(fleet.bundle("d"), brokers=[broker, broker.replace("127.0.0.1", "localhost")], password="x" * 43)
    assert _join(tmp_path, bundle, "--no-check").returncode == 0
    (tmp_path / "state/device.toml").write_text('data = { source = "digits" }\n')
    result = typed("edge_client", "start", "--state-dir", tmp_path / "state")
    assert result.returncode == 5
    lines = result.stderr.splitlines()
    assert "not connected (credentials): 127.0.0.1:" in lines[-2]
    assert lines[-1].startswith("edge-client: the broker does not let device 'd' in (localhost:")


def test_a_listener_that_says_nothing_is_given_up() -> None:
    """TCP is there, MQTT is not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        fields = {"federation": "f", "device": "d", "password": "p" * 16, "key": "0" * 64}
        bundle = from_map(identity.Bundle, {**fields, "brokers": [f"mqtt://{where}"]})
        with pytest.raises(NetworkError, match=f"no broker of this bundle answers .*{where}"):
            connection.check(bundle, within_s=0.3)


def test_encrypted_and_plain_brokers_are_not_mixed() -> None:
    """Whoever can block the encrypted one would make the device use the other."""
    fields = {"federation": "f", "device": "d", "password": "p" * 16, "key": "0" * 64}
    bundle = from_map(identity.Bundle, {**fields, "brokers": ["mqtts://a", "mqtt://b"]})
    with pytest.raises(InputError, match="all mqtts:// or all mqtt://, got mqtts://a, mqtt://b"):
        connection.check(bundle)


@pytest.mark.broker
def test_a_lost_connection_is_sought_where_it_was_then_elsewhere(broker_site: BrokerSite) -> None:
    """Two ways to one broker: a cut leads to the same way again; when that way is gone, to the other one."""
    with Proxy() as first, Proxy() as second:
        first.target = second.target = ("127.0.0.1", broker_site.port)
        client = Client(
            lambda on_event: MqttTransport(
                host="127.0.0.1",
                port=first.port,
                others=[("127.0.0.1", second.port)],
                name="d1",
                password=broker_site.passwords["d1"],
                on_event=on_event,
                backoff=FAST,
                rng=random.Random(1),
            )
        )
        client.transport.connect()
        pump(lambda: client.count(Connected) == 1, client)
        first.cut_all()
        pump(lambda: client.count(Connected) == 2, client)
        assert (first.num_connections, second.num_connections) == (2, 0)
        first.target = ("127.0.0.1", 1)  # nobody: whoever connects is cut
        first.cut_all()
        pump(lambda: client.count(Connected) == 3, client)
        assert second.num_connections == 1


def test_waits_grow_once_per_turn_through_all_brokers() -> None:
    """Three dead brokers: the wait after the 3rd, 6th and 9th failure is drawn from 1, 2 and 4 units, others from 1."""
    events: list[object] = []
    ports = [int(_nowhere().rpartition(":")[2]) for _ in range(3)]
    asked: list[float] = []

    class Recorded(Backoff):
        """Remembers the attempt that each wait is for."""

        def delay_s(self, attempt: int, rng: random.Random) -> float:
            asked.append(self.min_s * 2.0**attempt)
            return 0.0

    transport = MqttTransport(
        host="127.0.0.1",
        port=ports[0],
        others=[("127.0.0.1", port) for port in ports[1:]],
        name="d",
        on_event=events.append,
        backoff=Recorded(),
    )
    transport.connect()
    while len(events) < 9:
        transport.poll(0.01)
    transport.close()
    assert asked[:9] == [1, 1, 1, 1, 1, 2, 1, 1, 4]
    reasons = [event.reason for event in events[:4] if isinstance(event, Disconnected)]
    assert [reason.split(":")[1] for reason in reasons] == [str(port) for port in (*ports, ports[0])]


def test_the_owner_bounds_the_wait() -> None:
    """Ten attempts at a dead broker: below 10 s with waits of at most 1 s, 3 min on average with those of a minute."""
    fields = {"federation": "f", "device": "d", "password": "p" * 16, "key": "0" * 64, "brokers": [_nowhere("mqtt")]}
    events: list[object] = []
    transport = connection.connect(from_map(identity.Bundle, fields), events.append, "boot", longest_wait_s=1.0)
    transport.connect()
    until = time.monotonic() + 20
    while len(events) < 10 and time.monotonic() < until:
        transport.poll(0.1)
    transport.close()
    assert len(events) == 10
