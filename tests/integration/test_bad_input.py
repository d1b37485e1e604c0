"""What people get wrong ends with one clear line on standard error, a numbered exit code, and nothing half-written.

Exit codes: 3 a file or a value, 4 this machine, 5 credentials, 7 no such name, 8 a conflict. A client whose broker is
not there keeps trying, and says why in one line.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Fleet
from typed import typed

from edge_client.client import identity
from edge_client.records import from_map, to_map

RUN = """
name = "test"
model = { name = "mlp", input = [1, 8, 8] }
classes = ["a", "b"]
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator with one device, which does not run."""
    with Fleet(tmp_path_factory.mktemp("bad-input")) as fleet:
        fleet.start_coordinator()
        fleet.write_bundle("taken")
        yield fleet


def _type(package: str, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A command of somebody who has no state directory yet."""
    nowhere = {"FEDFIT_STATE_DIR": "/nonexistent/fedfit", "FEDFIT_DEVICE_DIR": "/nonexistent/fedfit"}
    return typed(package, *arguments, stdin=stdin, environment=nowhere)


def _assert_one_line(result: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert result.returncode == code, result.stderr
    lines = [line for line in result.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith(("coordinator: ", "edge-client: "))
    for part in parts:
        assert part in lines[0]
    assert result.stdout == ""


BAD_RUNS: dict[str, tuple[str, list[str]]] = {
    "not TOML": ("name = test", ["not valid TOML", "line 1"]),
    "binary": ("name = '\udcff'", ["not valid TOML"]),
    "empty": ("", ["name is missing"]),
    "unknown method": (RUN + 'method = "fedmagic"', ["'fedmagic'", "fedavg"]),
    "unknown parameter": (RUN + 'method = { name = "fedprox", nu = 1 }', ["nu", "mu"]),
    "unknown model": (RUN.replace("mlp", "gpt"), ["'gpt'", "mlp"]),
    "unknown key": (RUN + "[train]\nbacth = 3", ["unknown key 'train.bacth'", "did you mean 'batch'?"]),
    "a word for a number": (RUN + "[train]\nbatch = 'many'", ["train.batch", "int"]),
    "out of range": (RUN + "[train]\nbatch = 0", ["train.batch", "expected 1 to 65536", "0"]),
    "a duration without unit": (RUN + "[rounds]\ndeadline = '30'", ["rounds.deadline", "30min", "'30'"]),
    "one class": (RUN.replace('["a", "b"]', '["a"]'), ["classes", "two or more"]),
}


@pytest.mark.parametrize("what", list(BAD_RUNS))
def test_a_bad_run_file_names_the_place_and_what_was_expected(fleet: Fleet, tmp_path: Path, what: str) -> None:
    """Nothing is started."""
    text, parts = BAD_RUNS[what]
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    _assert_one_line(_type("coordinator", "run", "start", path, "--state-dir", fleet.state_dir), 3, *parts)
    answer = fleet.ask("run-list")
    assert answer is not None
    assert answer["runs"] == []


def test_a_missing_run_file_is_named(fleet: Fleet, tmp_path: Path) -> None:
    """3, with the path."""
    path = tmp_path / "no.toml"
    result = _type("coordinator", "run", "start", path, "--state-dir", fleet.state_dir)
    _assert_one_line(result, 3, str(path), "No such file or directory")


def test_names_that_nobody_has_list_the_known_ones(fleet: Fleet) -> None:
    """7 for a run and for a device."""
    state_dir = fleet.state_dir
    _assert_one_line(_type("coordinator", "run", "show", "x-1", "--state-dir", state_dir), 7, "'x-1'", "none yet")
    _assert_one_line(_type("coordinator", "run", "stop", "x-1", "--state-dir", state_dir), 7, "'x-1'")
    result = _type("coordinator", "device", "remove", "nobody", "--state-dir", state_dir)
    _assert_one_line(result, 7, "'nobody'", "known: taken")


def test_a_device_that_exists_is_not_added_again(fleet: Fleet, tmp_path: Path) -> None:
    """8; no bundle is written, and the other name of the same command is not added either."""
    result = _type("coordinator", "device", "add", "fresh", "taken", "--out", tmp_path, "--state-dir", fleet.state_dir)
    _assert_one_line(result, 8, "'taken'", "exists already")
    assert list(tmp_path.iterdir()) == []
    answer = fleet.ask("device-list")
    assert answer is not None
    assert [device["id"] for device in answer["devices"]] == ["taken"]


def test_a_bad_device_name_or_folder_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    """3 for both."""
    result = _type("coordinator", "device", "add", "no spaces", "--out", tmp_path, "--state-dir", fleet.state_dir)
    _assert_one_line(result, 3, "'no spaces'", "letters, digits")
    missing = tmp_path / "missing" / "deeper"
    result = _type("coordinator", "device", "add", "d", "--out", missing, "--state-dir", fleet.state_dir)
    _assert_one_line(result, 3, str(missing), "folder")


@pytest.mark.parametrize("command", ["run list", "run show latest", "device list", "run stop latest"])
def test_without_a_running_coordinator_the_start_command_is_named(tmp_path: Path, command: str) -> None:
    """4: no coordinator runs on the directory."""
    result = _type("coordinator", *command.split(), "--state-dir", tmp_path)
    _assert_one_line(result, 4, "no coordinator runs", "coordinator start --state-dir")


def test_a_run_without_a_running_coordinator_says_how_to_start_it(tmp_path: Path) -> None:
    """4, for a run file that is right."""
    (tmp_path / "run.toml").write_text(RUN)
    result = _type("coordinator", "run", "start", tmp_path / "run.toml", "--state-dir", tmp_path)
    _assert_one_line(result, 4, "no coordinator runs", "coordinator start --state-dir")


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ('"defects"', "defects.py: No such file or directory"),
        ('{ name = "defects", file = "defects" }', "expected a task as FILE.py:OBJECT, got 'defects'"),
        ('{ name = "defects", file = "pipe.py" }', "pipe.py: it is no file"),
        ('{ name = "defects", file = "large.py" }', "expected a task of at most 1048576 bytes"),
    ],
)
def test_a_task_that_cannot_be_read_is_named_before_anybody_is_asked(tmp_path: Path, task: str, problem: str) -> None:
    """3: missing, no Python file, a pipe that would be waited for, a file too large to be a task."""
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "large.py").write_bytes(b"#" * (2**20 + 1))
    path = tmp_path / "run.toml"
    path.write_text(f'name = "r"\ntask = {task}\nclasses = ["a", "b"]\n')
    result = _type("coordinator", "run", "start", path, "--state-dir", tmp_path / "none")
    _assert_one_line(result, 3, str(path), problem)


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    """4, with the port and what to do; the next start on another port is not hindered by this one."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        here = ("--listen", "127.0.0.1", "--state-dir", tmp_path / "state")
        result = _type("coordinator", "start", "--port", port, *here)
    _assert_one_line(result, 4, str(port), "already in use", "--port")


def test_a_second_coordinator_on_the_same_directory_is_refused(fleet: Fleet) -> None:
    """8; the first one goes on."""
    result = _type("coordinator", "start", "--listen", "127.0.0.1", "--port", 0, "--state-dir", fleet.state_dir)
    _assert_one_line(result, 8, "another coordinator already runs", str(fleet.state_dir))
    assert fleet.ask("status") is not None


@pytest.mark.parametrize("package", ["coordinator", "edge_client"])
def test_a_foreign_or_impossible_state_directory_is_left_alone(fleet: Fleet, tmp_path: Path, package: str) -> None:
    """4: somebody's files, a path below a file, and the directory of the other program."""
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("precious")
    other = tmp_path / "other"
    other.mkdir()
    (other / "version").write_text("fedfit-something 1\n")
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "version").write_text(f"fedfit-{'coordinator' if package == 'coordinator' else 'device'} 999\n")
    bundle = fleet.folder / "taken.join"
    for place, text in (
        (foreign, "not made by fedfit"),
        (foreign / "thesis.txt" / "below", "Not a directory"),
        (other, "fedfit-something"),
        (newer, "newer fedfit"),
    ):
        command = ["start", "--port", 0] if package == "coordinator" else ["join", bundle]
        _assert_one_line(_type(package, *command, "--state-dir", place), 4, text, str(place))
    assert [entry.name for entry in foreign.iterdir()] == ["thesis.txt"]


BAD_BUNDLES = {
    "not JSON": "fedfit",
    "a list": "[1, 2]",
    "deep": "[" * 100_000,
    "not a bundle": '{"hello": 1}',
    "another version": '{"fedfit": 2}',
    "empty": "",
}


@pytest.mark.parametrize("what", list(BAD_BUNDLES))
def test_a_file_that_is_no_bundle_is_refused(tmp_path: Path, what: str) -> None:
    """3, from a file and from standard input; no state directory appears."""
    path, state_dir = tmp_path / "x.join", tmp_path / "state"
    path.write_text(BAD_BUNDLES[what])
    result = _type("edge_client", "join", path, "--state-dir", state_dir)
    _assert_one_line(result, 3, str(path), "not a join bundle", "coordinator device add")
    result = _type("edge_client", "join", "-", "--state-dir", state_dir, stdin=BAD_BUNDLES[what])
    _assert_one_line(result, 3, "standard input", "not a join bundle")
    assert not state_dir.exists()


def test_a_device_without_bundle_or_device_file_is_told_what_to_do(fleet: Fleet, tmp_path: Path) -> None:
    """3: not joined yet; joined, but nobody said where the data is; a bundle that does not exist."""
    state_dir = tmp_path / "state"
    _assert_one_line(_type("edge_client", "start", "--state-dir", state_dir), 3, "edge-client join")
    _assert_one_line(_type("edge_client", "join", tmp_path / "no.join", "--state-dir", state_dir), 3, "no.join")
    bundle = fleet.folder / "taken.join"
    result = _type("edge_client", "start", "--join", bundle, "--state-dir", state_dir)
    assert result.returncode == 3
    assert "device.toml is missing" in result.stderr


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('data = { source = "imagenet" }', ["'imagenet'", "digits"]),
        ('limits = { memory = "lots" }', ["limits.memory", "512MB", "'lots'"]),
        ("lables = {}", ["unknown key 'lables'", "did you mean 'labels'?"]),
        ('data = { source = "npz", train = "/nowhere/x.npz" }', ["data.train: /nowhere/x.npz does not exist"]),
    ],
)
def test_a_bad_device_file_is_refused_at_the_start(fleet: Fleet, tmp_path: Path, text: str, parts: list[str]) -> None:
    """3, before anything connects."""
    path = tmp_path / "device.toml"
    path.write_text(text)
    options = ["--join", fleet.folder / "taken.join", "--config", path, "--state-dir", tmp_path / "state"]
    _assert_one_line(_type("edge_client", "start", *options), 3, *parts)


def test_a_state_directory_belongs_to_one_device_and_one_daemon(fleet: Fleet, tmp_path: Path) -> None:
    """8 for the bundle of another device, and for a second daemon; the first one goes on."""
    fleet.add_devices("one", "two")
    fleet.start_device("one")
    fleet.wait_until(lambda: _is_online(fleet, "one"), 30, "the first is there")
    home = fleet.folder / "one"
    options = ["--config", home / "device.toml", "--state-dir", home / "state"]
    result = _type("edge_client", "start", "--join", home / "device.join", *options)
    _assert_one_line(result, 8, "another device already runs on", str(home / "state"))
    other = tmp_path / "two.join"
    identity.write_bundle(other, fleet.bundle("two"))
    assert fleet.stop("one") == 0
    result = _type("edge_client", "join", other, "--state-dir", home / "state")
    _assert_one_line(result, 8, "already belongs to device 'one'", "'two'")


def _is_online(fleet: Fleet, name: str) -> bool:
    answer = fleet.ask("device-list")
    return answer is not None and any(device["id"] == name and device["online"] for device in answer["devices"])


def test_two_daemons_with_one_identity_are_told(fleet: Fleet, tmp_path: Path) -> None:
    """The copy is refused with `duplicate_identity` and says so; the first one stays."""
    fleet.add_devices("twin")
    fleet.start_device("twin")
    fleet.wait_until(lambda: _is_online(fleet, "twin"), 30, "the first is there")
    fleet.start_copy("twin", "copy")
    fleet.wait_until(lambda: "duplicate_identity" in fleet.log("copy"), 60, "the copy is told that it is one")
    assert "another client uses the name 'twin'" in fleet.log("copy")
    assert "duplicate_identity" not in fleet.log("twin")
    assert fleet.exit_code("twin") is fleet.exit_code("copy") is None
    assert fleet.stop("copy") == fleet.stop("twin") == 0


def test_a_wrong_password_is_told_with_what_to_do(fleet: Fleet, tmp_path: Path) -> None:
    """5: only a person can mend it."""
    fleet.add_devices("stranger")
    bundle = from_map(identity.Bundle, {**to_map(fleet.bundle("stranger")), "password": "x" * 43})
    identity.write_bundle(tmp_path / "stranger.join", bundle)
    (tmp_path / "device.toml").write_text('data = { source = "digits" }')
    options = ["--join", tmp_path / "stranger.join", "--config", tmp_path / "device.toml"]
    result = _type("edge_client", "start", *options, "--state-dir", tmp_path / "state")
    _assert_one_line(result, 5, "'stranger'", "password", "join again with a new bundle")


@pytest.mark.parametrize("problem", ["nobody listens", "no TLS there"])
def test_a_client_without_a_broker_says_why_and_keeps_trying(fleet: Fleet, problem: str) -> None:
    """One line with the reason; it does not end, because time may mend it."""
    name = problem.replace(" ", "-")
    fleet.add_devices(name)
    data = to_map(fleet.bundle(name))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"mqtt://127.0.0.1:{closed.getsockname()[1]}"
    broker = nowhere if problem == "nobody listens" else data["brokers"][0].replace("mqtt:", "mqtts:")
    fleet.replace_bundle(from_map(identity.Bundle, {**data, "brokers": [broker]}))
    fleet.start_device(name)
    fleet.wait_until(lambda: "not connected (network): cannot reach 127.0.0.1:" in fleet.log(name), 30, "it says why")
    assert fleet.exit_code(name) is None
    assert "Traceback" not in fleet.log(name)
    assert fleet.stop(name) == 0


def test_a_control_request_without_sense_is_answered(fleet: Fleet) -> None:
    """Lines that are no JSON, no object, no known request or have wrong fields get an error; the coordinator stays."""
    lines = ["nonsense", "[1]", '{"request": "fly"}', '{"request": "run-show"}', '{"request": "run-start", "file": 1}']
    for line in lines:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(fleet.state_dir / "control.sock"))
            connection.settimeout(20)
            connection.sendall(line.encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline())
        assert (answer["ok"], answer["error"]) == (False, "InputError"), line
    assert fleet.ask("status") is not None
