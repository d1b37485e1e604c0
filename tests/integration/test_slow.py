"""Minutes of trouble: hundreds of random kills, a thin and broken line for the whole demo, a slow device, mosquitto."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import raw_requests
from fleet import Fleet, Json, Undisturbed, hashes, mlp_run
from proxy import Link, Proxy
from sites import BrokerSite, connected, find_mosquitto, mosquitto_config

from coordinator.broker.broker import DeviceAccess, new_password
from edge_client.errors import MachineError
from edge_client.transport.base import parse_broker_url
from edge_client.wire.topics import Topics

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("FEDFIT_TEST_KILLS", "300"))
THIN = Link(bytes_per_s=256_000, delay_s=0.2, cut_every_s=20.0)


def _victim(fleet: Fleet, name: str) -> psutil.Process | None:
    """The process of that name, if it lives just now."""
    with contextlib.suppress(psutil.NoSuchProcess, ValueError, IndexError):
        if name in ("coordinator", "a", "b"):
            return psutil.Process(fleet.pid(name))
        parent, word = {"worker": ("a", "edge_client.worker"), "broker": ("coordinator", "nats")}.get(
            name, ("coordinator", "coordinator.aggregation.process")
        )
        children = psutil.Process(fleet.pid(parent)).children(recursive=True)
        named = [child for child in children if word in " ".join(child.cmdline())]
        return named[-1] if named else None  # a worker rather than the template that it is a fork of
    return None


def _passed(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


def test_random_kills_in_a_row_change_no_model(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Any process at any time (seed 11), 300 times: every round that was committed has the undisturbed model."""
    rng = random.Random(11)
    names = ("coordinator", "a", "b", "worker", "broker", "aggregator")
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator()
        fleet.add_devices("a", "b")
        fleet.start_device("a")
        fleet.start_device("b")
        run = fleet.start_run(mlp_run(rounds=100_000))
        num_killed = 0
        while num_killed < KILLS:
            victim = _victim(fleet, rng.choice(names))
            if victim is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
                    num_killed += 1
            fleet.wait_until(_passed(rng.uniform(0.0, 3.0)), 60, "the next kill is due")
        fleet.wait_until(lambda: fleet.ask("run-stop", run=run) is not None, 60, "the coordinator takes the stop")
        disturbed = hashes(fleet.wait_finished(run, 300))
        assert fleet.unexpected == []
        assert "Traceback" not in fleet.log("coordinator") + fleet.log("a") + fleet.log("b")
    assert len(disturbed) > KILLS // 30
    assert disturbed == undisturbed.hashes(rounds=len(disturbed) - 1)


def _demo(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "coordinator", "demo", "--rounds", "2", "--format", "json", "--keep", str(folder)]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _result(demo: subprocess.Popen[str]) -> Json:
    printed, said = demo.communicate(timeout=900)
    assert demo.returncode == 0, said
    result: Json = json.loads(printed)
    return result


def test_the_demo_with_tls_through_a_thin_and_broken_line_gives_the_same_model(tmp_path: Path) -> None:
    """256 kB/s, 200 ms each way, and all connections cut every 20 s."""
    with Proxy() as proxy:
        proxy.link = THIN
        demo = _demo(tmp_path / "thin", "--tls", "--through", proxy.address)
        while demo.poll() is None and proxy.target is None:
            with contextlib.suppress(MachineError):
                brokers = raw_requests.request(tmp_path / "thin" / "coordinator", "status")["brokers"]
                proxy.target = ("127.0.0.1", parse_broker_url(brokers[0]).port)
            time.sleep(0.1)
        thin = _result(demo)
        assert proxy.num_cuts > 0
    direct = _result(_demo(tmp_path / "direct"))
    assert thin["model_sha256"] == direct["model_sha256"]
    assert thin["accuracy_per_round"] == direct["accuracy_per_round"]


def test_a_slow_device_neither_stops_the_others_nor_is_dropped(tmp_path: Path) -> None:
    """A model of 4.8 MB; one of four devices has 256 kB/s: the others are done before it, and it finishes too."""
    with Proxy() as proxy, Fleet(tmp_path) as fleet:
        proxy.link = Link(bytes_per_s=256_000)
        fleet.start_coordinator()
        status = fleet.ask("status")
        assert status is not None
        proxy.target = ("127.0.0.1", parse_broker_url(status["brokers"][0]).port)
        fast = ("f1", "f2", "f3")
        fleet.add_devices(*fast)
        fleet.reroute = proxy.address
        fleet.add_devices("slow")
        for name in (*fast, "slow"):
            fleet.start_device(name)
        run = fleet.start_run(mlp_run(rounds=1, devices=4, model={"hidden": [16_384]}))

        def stored() -> set[str]:
            return {lease["device"] for lease in fleet.show(run)["leases"] if lease["state"] == "stored"}

        fleet.wait_until(lambda: stored() == set(fast), 300, "the fast ones are done, the slow one is not")
        shown = fleet.wait_finished(run, 300)
        assert {lease["device"] for lease in shown["leases"] if lease["state"] == "stored"} == {*fast, "slow"}
        for name in (*fast, "slow"):
            assert "not connected" not in fleet.log(name)
            assert fleet.log(name).count("connected to the broker") == 1
        assert fleet.log("coordinator").count("connected to the broker") == 1


class Mosquitto:
    """mosquitto with one user per device and exact topics, as an administrator would set it up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        everything = ("fl/v1/#",)
        self.coordinator = DeviceAccess(
            name="coordinator", password=new_password(), publish=everything, subscribe=everything
        )
        self._config = mosquitto_config(folder, self.port, [self.coordinator])
        self.start()

    def start(self) -> None:
        """Start, and wait until it listens."""
        binary = find_mosquitto()
        assert binary is not None
        self.process = subprocess.Popen([binary, "-c", str(self._config)])
        while self.process.poll() is None:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
                return

    def let_in(self, fleet: Fleet, *names: str) -> None:
        """Users and topics of the devices; it reads them again at SIGHUP. Returns when the last one is let in."""
        users = [self.coordinator]
        for name in names:
            bundle = fleet.bundle(name)
            topics = Topics(bundle.federation)
            users.append(
                DeviceAccess(
                    name=name,
                    password=bundle.password,
                    publish=topics.device_publishes(name),
                    subscribe=topics.device_may_subscribe(name),
                )
            )
        mosquitto_config(self._folder, self.port, users)
        self.process.send_signal(signal.SIGHUP)
        site = BrokerSite("127.0.0.1", self.port, Topics("any"), {names[-1]: users[-1].password})
        connected(site, names[-1]).transport.close()


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    """A running mosquitto."""
    if find_mosquitto() is None or shutil.which("mosquitto_passwd") is None:
        pytest.skip("mosquitto is not installed")
    folder = tmp_path / "mosquitto"
    folder.mkdir()
    broker = Mosquitto(folder)
    yield broker
    broker.process.kill()
    broker.process.wait()


@pytest.mark.mosquitto
def test_mosquitto_instead_of_the_embedded_broker_gives_the_same_models(
    tmp_path: Path, mosquitto: Mosquitto, undisturbed: Undisturbed
) -> None:
    """Three rounds, and mosquitto dies with -9 in the second one."""
    options = ("--broker", f"mqtt://127.0.0.1:{mosquitto.port}")
    with Fleet(tmp_path, start_options=options) as fleet:
        fleet.start_coordinator({"FEDFIT_BROKER_PASSWORD": mosquitto.coordinator.password})
        fleet.add_devices("a", "b")
        mosquitto.let_in(fleet, "a", "b")
        fleet.start_device("a")
        fleet.start_device("b")
        run = fleet.start_run(mlp_run(rounds=3))
        fleet.wait_until(lambda: len(fleet.show(run)["models"]) == 2, 120, "round 1 is committed")
        mosquitto.process.kill()
        mosquitto.process.wait()
        mosquitto.start()
        assert hashes(fleet.wait_finished(run, 200)) == undisturbed.hashes(rounds=3)
        assert fleet.unexpected == []
