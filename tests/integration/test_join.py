"""The first day: addresses and certificates, devices that are added, replaced, labelled and removed, join to leave."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import raw_requests
from cryptography import x509
from fleet import Fleet, mlp_run
from sites import access_of, find_mosquitto, mosquitto_config
from typed import ok, typed

from coordinator.broker.certificates import ensure_pki
from edge_client.client import identity
from edge_client.records import from_map, to_map
from edge_client.transport.base import parse_broker_url
from edge_client.wire.topics import Topics

pytestmark = pytest.mark.broker

SECONDS = 60
DIGITS = 'data = { source = "digits" }\nlimits = { memory = "2GB" }\n'


def _show(fleet: Fleet, name: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(
        ok("coordinator", "device", "show", name, "--format", "json", "--state-dir", fleet.state_dir)
    )
    return shown


def _is_online(fleet: Fleet, name: str) -> bool:
    answer = fleet.ask("device-list")
    return answer is not None and any(device["id"] == name and device["online"] for device in answer["devices"])


def _says_that_it_is_out(fleet: Fleet, name: str) -> bool:
    return "any more" in fleet.log(name)


def _device(fleet: Fleet, name: str, file: str = DIGITS) -> None:
    """A client that has joined and has a device file."""
    home = fleet.folder / name
    home.mkdir()
    identity.write_bundle(home / "device.join", fleet.bundle(name))
    (home / "device.toml").write_text(file)
    fleet.start_device(name)
    fleet.wait_until(lambda: _is_online(fleet, name), SECONDS, f"{name} is there")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator that listens on all addresses, so with TLS, and is advertised as localhost."""
    options = ("--listen", "0.0.0.0", "--advertise", "localhost")
    with Fleet(tmp_path_factory.mktemp("join"), start_options=options) as fleet:
        fleet.start_coordinator()
        yield fleet


def _broker(fleet: Fleet) -> tuple[str, int]:
    status = fleet.ask("status")
    assert status is not None
    url = parse_broker_url(status["brokers"][0])
    assert url.tls
    return url.host, url.port


def _served_names(port: int) -> set[str]:
    """Names in the certificate that the broker shows."""
    certificate = x509.load_pem_x509_certificate(ssl.get_server_certificate(("127.0.0.1", port)).encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def test_a_name_that_is_added_later_needs_nothing_new_on_devices(fleet: Fleet) -> None:
    """The authority stays: the old device comes back, new bundles have both addresses, the certificate both names."""
    fleet.add_devices("old")
    _device(fleet, "old")
    _, port = _broker(fleet)
    assert _served_names(port) == {"localhost", "127.0.0.1", "::1"}
    fleet.stop("coordinator")
    fleet._start_options = (*fleet._start_options, "--advertise", "fed.example")
    fleet.start_coordinator()
    fleet.wait_until(lambda: _is_online(fleet, "old"), SECONDS, "the old device is back")
    fleet.add_devices("new")
    old, new = fleet.bundle("old"), fleet.bundle("new")
    assert old.brokers == (f"mqtts://localhost:{port}",)
    assert new.brokers == (f"mqtts://localhost:{port}", f"mqtts://fed.example:{port}")
    assert new.ca == old.ca
    assert _served_names(port) == {"localhost", "127.0.0.1", "::1", "fed.example"}
    assert fleet.stop("old") == 0


def test_an_address_that_nobody_could_use_stops_the_start(tmp_path: Path) -> None:
    """3, before anything is made."""
    result = typed("coordinator", "start", "--advertise", "host:8883", "--state-dir", tmp_path / "state")
    assert (result.returncode, "'host:8883'" in result.stderr) == (3, True)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("second", "accepted"), [(0, True), (4_070_908_800, True), (4_133_980_800, False)], ids=["1970", "2099", "2101"]
)
def test_a_client_that_believes_it_is_another_year_connects(
    fleet: Fleet, tmp_path: Path, second: int, accepted: bool
) -> None:
    """OpenSSL's own client, which looks at dates, at the first second of 1970 and of 2099; 2101 shows that it does."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    ca = tmp_path / "ca.pem"
    fleet.add_devices(f"clock-{second}")
    ca.write_text(fleet.bundle(f"clock-{second}").ca or "")
    host, port = _broker(fleet)
    command = [openssl, "s_client", "-connect", f"{host}:{port}", "-attime", str(second), "-CAfile", str(ca)]
    command += ["-verify_hostname", host, "-verify_return_error", "-brief"]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False, timeout=SECONDS)
    assert ("Verification: OK" in done.stderr, done.returncode == 0) == (accepted, accepted), done.stderr


def test_a_server_that_is_not_ours_is_told_in_one_line(fleet: Fleet, tmp_path: Path) -> None:
    """Exit 5 at the join, for another authority and for a name that the certificate lacks; nothing is stored."""
    fleet.add_devices("wary")
    data = to_map(fleet.bundle("wary"))
    _, port = _broker(fleet)
    foreign = ensure_pki(tmp_path / "pki", ["localhost"]).ca_pem
    cases = {
        "of the authority in this device's bundle": {**data, "brokers": data["brokers"][:1], "ca": foreign},
        "--advertise 127.0.0.2": {**data, "brokers": [f"mqtts://127.0.0.2:{port}"]},
    }
    for part, changed in cases.items():
        identity.write_bundle(tmp_path / "wary.join", from_map(identity.Bundle, changed))
        result = typed("edge_client", "join", tmp_path / "wary.join", "--state-dir", tmp_path / "state")
        assert result.returncode == 5
        assert len(result.stderr.splitlines()) == 1
        assert part in result.stderr
        assert not (tmp_path / "state").exists()


def test_fresh_secrets_end_the_old_bundle_at_once(fleet: Fleet, tmp_path: Path) -> None:
    """The old client is cut and says so once; with the new bundle it is let in; the labels given here are kept."""
    state_dir = fleet.state_dir
    ok("coordinator", "device", "add", "moved", "--label", "line=a", "--out", tmp_path, "--state-dir", state_dir)
    fleet.replace_bundle(identity.read_bundle(tmp_path / "moved.join"))
    _device(fleet, "moved")
    ok("coordinator", "device", "add", "moved", "--replace", "--out", tmp_path, "--state-dir", state_dir)
    assert not _is_online(fleet, "moved")
    fleet.wait_until(lambda: "does not let device 'moved' in any more" in fleet.log("moved"), SECONDS, "it says so")
    assert not _is_online(fleet, "moved")
    assert fleet.exit_code("moved") is None
    at = ["--state-dir", fleet.folder / "moved" / "state"]

    def told() -> bool:
        status = json.loads(ok("edge_client", "status", "--format", "json", *at))
        problem = status["error"]["text"] if status["error"] else ""
        return (status["running"], status["link"], "(credentials)" in problem) == (True, "connecting", True)

    fleet.wait_until(told, SECONDS, "its status tells why")
    assert fleet.stop("moved") == 0
    shutil.copy(tmp_path / "moved.join", fleet.folder / "moved" / "device.join")
    fleet.start_device("moved")
    fleet.wait_until(lambda: _is_online(fleet, "moved"), SECONDS, "it is let in with the new bundle")
    assert _show(fleet, "moved")["labels"] == {"line": "a"}
    assert fleet.stop("moved") == 0
    result = typed("coordinator", "device", "add", "nobody", "--replace", "--out", tmp_path, "--state-dir", state_dir)
    assert (result.returncode, "'nobody'" in result.stderr) == (7, True)


def test_labels_of_both_sides_are_shown_and_changed(fleet: Fleet) -> None:
    """Those given at the coordinator win; taken away, the device's own is there again."""
    fleet.add_devices("labelled")
    _device(fleet, "labelled", DIGITS + 'labels = { line = "a", site = "x" }\n')
    verb = ["coordinator", "device", "label", "labelled"]
    assert ok(*verb, "line=b", "floor=2", "--state-dir", fleet.state_dir) == "labelled: floor=2 line=b site=x\n"
    shown = _show(fleet, "labelled")
    assert shown["labels_given"] == {"line": "b", "floor": "2"}
    assert shown["labels_own"] == {"line": "a", "site": "x"}
    assert shown["profile"]["budget_bytes"] == 2 * 10**9
    assert ok(*verb, "line-", "floor-", "--state-dir", fleet.state_dir) == "labelled: line=a site=x\n"
    assert typed(*verb[:-1], "nobody", "a=b", "--state-dir", fleet.state_dir).returncode == 7
    names = ok("coordinator", "device", "list", "-q", "--state-dir", fleet.state_dir).split()
    assert "labelled" in names
    assert fleet.stop("labelled") == 0


def test_removed_devices_are_cut_and_the_others_stay(fleet: Fleet) -> None:
    """Two of three at once; an unknown name among them removes nobody."""
    names = ("gone-1", "gone-2", "stays")
    fleet.add_devices(*names)
    for name in names:
        _device(fleet, name)
    verb = ["coordinator", "device", "remove"]
    assert typed(*verb, "gone-1", "nobody", "--state-dir", fleet.state_dir).returncode == 7
    assert _is_online(fleet, "gone-1")
    assert ok(*verb, "gone-1", "gone-2", "--state-dir", fleet.state_dir) == "removed gone-1, gone-2\n"
    for name in ("gone-1", "gone-2"):
        fleet.wait_until(partial(_says_that_it_is_out, fleet, name), SECONDS, f"{name} says that it is out")
        assert fleet.log(name).count("does not let device") == 1
        assert fleet.stop(name) == 0
    assert fleet.log("stays").count("connected to the broker") == 1
    assert _is_online(fleet, "stays")
    assert fleet.stop("stays") == 0


def test_a_device_shows_why_it_failed(fleet: Fleet) -> None:
    """Nothing fits into 1 MB: the code and the detail of its last lease."""
    fleet.add_devices("small")
    fleet.start_device("small", memory="1MB")
    run = fleet.start_run(mlp_run(rounds=1, devices=1))
    fleet.wait_until(lambda: bool(_show(fleet, "small")["failures"]), SECONDS, "its lease is declined")
    failure = _show(fleet, "small")["failures"][0]
    assert (failure["run"], failure["round"], failure["state"], failure["code"]) == (run, 1, "declined", "nothing_fits")
    text = ok("coordinator", "device", "show", "small", "--state-dir", fleet.state_dir)
    assert f"{run} declined in round 1: nothing_fits" in text
    ok("coordinator", "run", "stop", run, "--now", "--state-dir", fleet.state_dir)
    assert fleet.stop("small") == 0


def test_from_join_to_leave(fleet: Fleet, tmp_path: Path) -> None:
    """Bundle from standard input, data found, client started, status, leave refused, stopped, left, joined anew."""
    bundle = fleet.write_bundle("pi").read_text()
    folder, state_dir = tmp_path / "data", tmp_path / "state"
    folder.mkdir()
    digits = Path(identity.__file__).parents[1] / "data/digits.npz"
    shutil.copy(digits, folder / "train.npz")
    at = ["--state-dir", state_dir]
    said = ok("edge_client", "join", "-", "--data", folder, *at, stdin=bundle)
    assert f'data = {{ source = "npz", train = "{folder}/train.npz" }}' in said
    assert "source = 'npz'" in ok("edge_client", "config", *at).replace('"', "'")
    assert "does not run" in ok("edge_client", "status", *at)
    fleet._spawn("pi", ["edge_client", "start", *(str(word) for word in at)])
    fleet.wait_until(lambda: _is_online(fleet, "pi"), SECONDS, "the client is let in")

    def let_in() -> bool:
        told = json.loads(ok("edge_client", "status", "--format", "json", *at))
        return (told["running"], told["link"], told["state"], told["device"]) == (True, "let_in", "idle", "pi")

    fleet.wait_until(let_in, SECONDS, "its status says so")
    assert ((state_dir / "status.json").stat().st_mode & 0o777) == 0o600
    refused = typed("edge_client", "leave", "--yes", *at)
    assert (refused.returncode, "stop it first" in refused.stderr) == (8, True)
    assert fleet.stop("pi") == 0
    assert typed("edge_client", "leave", *at).returncode == 3  # nobody is there to be asked
    assert "coordinator device remove pi" in ok("edge_client", "leave", "--yes", *at)
    assert {entry.name for entry in state_dir.iterdir()} == {"device.toml", "lock", "version"}
    fleet.wait_until(lambda: not _is_online(fleet, "pi"), SECONDS, "lists, which may be a second old, show it")
    assert typed("edge_client", "status", *at).returncode == 3
    said = ok("edge_client", "join", "-", "--data", folder, *at, stdin=bundle)
    assert "stays as it is" in said


def test_a_client_that_cannot_say_goodbye_leaves_all_the_same(fleet: Fleet, tmp_path: Path) -> None:
    """Its broker is gone: it says that the coordinator does not know."""
    fleet.add_devices("lonely")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        broker = f"mqtts://127.0.0.1:{closed.getsockname()[1]}"
    bundle = from_map(identity.Bundle, {**to_map(fleet.bundle("lonely")), "brokers": [broker]})
    identity.join(tmp_path / "state", bundle)
    assert "could not be told" in ok("edge_client", "leave", "--yes", "--state-dir", tmp_path / "state")


def test_a_bundle_of_another_federation_or_half_of_one_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    """8 and 3; what was joined stays."""
    text = fleet.write_bundle("first").read_text()
    at = ["--no-check", "--state-dir", tmp_path / "state"]
    ok("edge_client", "join", "-", *at, stdin=text)
    other = json.dumps({**json.loads(text), "federation": "elsewhere"})
    refused = typed("edge_client", "join", "-", *at, stdin=other)
    assert (refused.returncode, "'elsewhere'" in refused.stderr) == (8, True)
    for half in (text[: len(text) // 2], text[:-3], text.replace(text[text.index('"key"') :], '"key": "12"}')):
        refused = typed("edge_client", "join", "-", *at, stdin=half)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (3, 1), refused.stderr
    assert identity.load_identity(tmp_path / "state").federation == json.loads(text)["federation"]


def test_devices_are_changed_without_a_running_coordinator(tmp_path: Path) -> None:
    """Added, labelled, replaced, removed in the store alone; the next start lets exactly the rest in."""
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator()
        fleet.add_devices("a", "b")
        fleet.stop("coordinator")
        at = ["--state-dir", fleet.state_dir]
        ok("coordinator", "device", "add", "c", "--label", "line=a", "--out", tmp_path / "bundles", *at)
        assert ok("coordinator", "device", "label", "c", "line=b", *at) == "c: line=b\n"
        ok("coordinator", "device", "add", "a", "--replace", "--out", tmp_path / "bundles", *at)
        ok("coordinator", "device", "remove", "b", *at)
        assert typed("coordinator", "device", "label", "b", "x=y", *at).returncode == 7
        fleet.start_coordinator()
        for name in ("a", "c"):
            fleet.replace_bundle(identity.read_bundle(tmp_path / "bundles" / f"{name}.join"))
            _device(fleet, name)
        assert _show(fleet, "c")["labels"] == {"line": "b"}
        assert typed("coordinator", "device", "show", "b", *at).returncode == 7


@contextlib.contextmanager
def _mosquitto(folder: Path, topics: Topics) -> Iterator[tuple[int, str, subprocess.Popen[bytes]]]:
    """Port, the coordinator's password, the process."""
    binary = find_mosquitto()
    if binary is None or shutil.which("mosquitto_passwd") is None:
        pytest.skip("mosquitto is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    coordinator = access_of(topics, "coordinator")
    process = subprocess.Popen([binary, "-c", mosquitto_config(folder, port, [coordinator])])
    try:
        while process.poll() is None:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
        yield port, coordinator.password, process
    finally:
        process.terminate()
        process.wait()


@pytest.mark.mosquitto
def test_what_device_add_prints_lets_a_device_into_a_mosquitto(tmp_path: Path) -> None:
    """The printed commands as they stand, a reload, and the device is there; removed, it is told by the coordinator."""
    with Fleet(tmp_path) as first:  # only to know the federation's id: the broker's rules name it
        first.start_coordinator()
        status = first.ask("status")
        assert status is not None
    broker = tmp_path / "mosquitto"
    broker.mkdir()
    with _mosquitto(broker, Topics(status["federation"])) as (port, password, process):
        options = ("--broker", f"mqtt://127.0.0.1:{port}")
        with Fleet(tmp_path, start_options=options) as fleet:
            fleet.start_coordinator({"FEDFIT_BROKER_PASSWORD": password})
            said = ok("coordinator", "device", "add", "d1", "--out", tmp_path, "--state-dir", fleet.state_dir)
            commands = re.search(r"^echo 'd1:.*?^END$", said, re.DOTALL | re.MULTILINE)
            assert commands is not None
            subprocess.run(["sh", "-e", "-c", commands[0]], cwd=broker, check=True)
            process.send_signal(signal.SIGHUP)
            bundle = identity.read_bundle(tmp_path / "d1.join")
            assert f'user: "d1", password: "{bundle.password}"' in said  # the entry for a NATS server
            fleet.replace_bundle(bundle)
            _device(fleet, "d1")
            said = ok("coordinator", "device", "remove", "d1", "--state-dir", fleet.state_dir)
            assert "sed -i '/^d1:/d' passwords" in said
            fleet.wait_until(lambda: "refuses this device: removed" in fleet.log("d1"), SECONDS, "it is told")
            assert fleet.stop("d1") == 0


def test_a_start_without_addresses_is_the_last_one_again(tmp_path: Path) -> None:
    """What stands in the bundles must not change because somebody typed less."""
    with Fleet(tmp_path, start_options=("--advertise", "localhost")) as fleet:
        fleet.start_coordinator()
        before = raw_requests.request(fleet.state_dir, "status")["brokers"]
        fleet.stop("coordinator")
        fleet._start_options = ()
        fleet.start_coordinator()
        assert raw_requests.request(fleet.state_dir, "status")["brokers"] == before
    assert [broker.rpartition(":")[0] for broker in before] == ["mqtt://localhost"]
