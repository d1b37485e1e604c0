"""A federation of real processes for the integration tests: coordinator with its broker, devices, and their deaths.

Each device has a state directory of its own and is started from its bundle, as on a real machine. `Fleet.supervise`
starts again what died, as systemd would; a process that ends by itself with an error is remembered in `unexpected`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import raw_requests

from edge_client.client import identity
from edge_client.client.daemon import ConnectTo, Daemon
from edge_client.config.device_file import DeviceFile
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.errors import MachineError
from edge_client.records import from_map, to_map

Json = dict[str, Any]

_MLP = {"name": "mlp", "input": [1, 8, 8], "hidden": [16]}


def mlp_run(
    *,
    rounds: int,
    devices: int = 2,
    where: Sequence[str] = (),
    deadline: str = "5min",
    codec: str = "fp32",
    **changes: Any,
) -> RunFile:
    """A run whose rounds are as short as they can be: one step of a small MLP on the digits."""
    table: dict[str, Any] = {
        "name": "test",
        "model": _MLP,
        "classes": [str(digit) for digit in range(10)],
        "train": {"batch": 16, "max-steps": 1, "lr": 0.1},
        "stop": {"rounds": rounds},
        "devices": {"min": devices, "where": list(where)},
        "rounds": {"deadline": deadline, "codec": codec},
        "evaluate": {"every": 0},
    }
    for key, value in changes.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_table(RunFile, table, source="test")


class Fleet:
    """Processes of one federation below one folder."""

    def __init__(self, folder: Path, *, start_options: tuple[str, ...] = (), reroute: str | None = None) -> None:
        """`reroute` is the host:port that devices use instead of the broker's own, for a proxy between them."""
        self.folder = folder
        self.state_dir = folder / "coordinator"
        self.reroute = reroute
        elsewhere = {"--broker", "--listen", "--advertise"} & {*start_options}
        self._start_options = start_options if elsewhere else ("--listen", "127.0.0.1", *start_options)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environments: dict[str, dict[str, str]] = {}
        self._bundles: dict[str, identity.Bundle] = {}
        self._roots: dict[str, Path] = {}
        self.unexpected: list[str] = []
        self.num_restarts: dict[str, int] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._processes)):
            self._processes[name].send_signal(signal.SIGTERM)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    # processes

    def _spawn(self, name: str, arguments: list[str]) -> None:
        environment = {**os.environ, **self._environments.get(name, {})}
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def start_coordinator(self, faults: Mapping[str, str] | None = None) -> None:
        """Start it and wait until it answers."""
        if faults is not None:
            self._environments["coordinator"] = dict(faults)
        options = ["--state-dir", str(self.state_dir), "--port", "0", "--heartbeat", "1", *self._start_options]
        self._spawn("coordinator", ["coordinator", "start", *options])
        self.wait_until(lambda: self.ask("status") is not None, 120, "the coordinator answers")

    def add_devices(self, *names: str) -> None:
        """Enrol devices."""
        answer = raw_requests.request(self.state_dir, "device-add", names=list(names))
        for data in answer["bundles"]:
            bundle = from_map(identity.Bundle, data)
            if self.reroute:
                scheme = bundle.brokers[0].partition("://")[0]
                bundle = from_map(identity.Bundle, {**data, "brokers": [f"{scheme}://{self.reroute}"]})
            self._bundles[bundle.device] = bundle

    def bundle(self, name: str) -> identity.Bundle:
        """What a device joined with."""
        return self._bundles[name]

    def write_bundle(self, name: str) -> Path:
        """Enrol a device and write its bundle, for tests that join by themselves."""
        self.add_devices(name)
        path = self.folder / f"{name}.join"
        identity.write_bundle(path, self._bundles[name])
        return path

    def replace_bundle(self, bundle: identity.Bundle) -> None:
        """The device gets this bundle instead of its own."""
        self._bundles[bundle.device] = bundle

    def start_copy(self, name: str, copy: str) -> None:
        """The same identity in another state directory."""
        home = self.folder / name
        options = ["--join", str(home / "device.join"), "--config", str(home / "device.toml")]
        self._spawn(copy, ["edge_client", "start", *options, "--state-dir", str(self.folder / copy)])

    def start_device(
        self,
        name: str,
        faults: Mapping[str, str] | None = None,
        *,
        memory: str = "2GB",
        data: str | None = None,
        more: str = "",
        root: Path | None = None,
    ) -> None:
        """Start a client from its bundle; its part of the digits follows from its place among the devices.

        `data` is another data section for its device.toml, `more` what else stands there; `root` holds the /proc that
        it measures memory by.
        """
        home = self.folder / name
        if faults is not None:
            self._environments[name] = dict(faults)
        if root is not None:
            self._roots[name] = root
        if not home.exists():
            part = f"[{list(self._bundles).index(name)}, {len(self._bundles)}]"
            own = f'{{ source = "digits", partition = "iid", part = {part} }}' if data is None else data
            text = f'data = {own}\nlimits = {{ memory = "{memory}", reconnect = "2s" }}\n'
            self.write_home(name, f"{text}{more}\n")
        options = ["--join", str(home / "device.join"), "--config", str(home / "device.toml")]
        if name in self._roots:
            options += ["--root", str(self._roots[name])]
        self._spawn(name, ["edge_client", "start", *options, "--state-dir", str(home / "state")])

    def write_home(self, name: str, device_toml: str) -> None:
        """What a device has before its first start: its bundle and its owner's file."""
        home = self.folder / name
        home.mkdir()
        identity.write_bundle(home / "device.join", self._bundles[name])
        (home / "device.toml").write_text(device_toml)

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self._processes[name].kill()
        self._processes[name].wait()

    def pid(self, name: str) -> int:
        """Process id of the coordinator or a device."""
        return self._processes[name].pid

    def stop(self, name: str, *, within_s: float = 15.0) -> int:
        """SIGTERM, and its exit code."""
        process = self._processes.pop(name)
        process.terminate()
        return process.wait(within_s)

    def exit_code(self, name: str) -> int | None:
        """None while it runs."""
        return self._processes[name].poll()

    def supervise(self) -> None:
        """Start again whatever died."""
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is None:
                continue
            self.num_restarts[name] = self.num_restarts.get(name, 0) + 1
            if code != -signal.SIGKILL:
                self.unexpected.append(f"{name} ended with {code}: {self.log(name)[-400:]}")
            if name == "coordinator":
                options = ["--state-dir", str(self.state_dir), "--port", "0", "--heartbeat", "1", *self._start_options]
                self._spawn("coordinator", ["coordinator", "start", *options])
            else:
                self.start_device(name)

    # asking

    def ask(self, what: str, **fields: Any) -> Json | None:
        """The coordinator's answer, or None while there is none."""
        try:
            return raw_requests.request(self.state_dir, what, **fields)
        except MachineError:
            return None

    def start_run(self, file: RunFile) -> str:
        """Start a run."""
        return str(raw_requests.request(self.state_dir, "run-start", file=to_map(file))["run"])

    def show(self, run: str) -> Json:
        """What the coordinator knows of a run."""
        return raw_requests.request(self.state_dir, "run-show", run=run)

    def wait_ended(self, name: str, within_s: float) -> int:
        """Wait until a process ends by itself; its exit code."""
        return self._processes.pop(name).wait(within_s)

    def wait_finished(self, run: str, timeout_s: float) -> Json:
        """Supervise until the run has ended."""

        def finished() -> bool:
            shown = self.ask("run-show", run=run)
            return shown is not None and shown["state"] not in ("queued", "running")

        self.wait_until(finished, timeout_s, f"run {run} ends")
        return self.show(run)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Supervise until `condition` holds."""
        until = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > until:
                raise AssertionError(f"waited {timeout_s:g} s until {what}\n{self.tail()}")
            if "coordinator" in self._processes:
                self.supervise()
            time.sleep(0.1)

    def log(self, name: str) -> str:
        """All that a process said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def tail(self) -> str:
        """The end of every log."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in logs)


class DeviceThread:
    """A client in a thread of the test, for transports that a process could not have; its workers are real."""

    def __init__(self, bundle: identity.Bundle, folder: Path, part: tuple[int, int], connect: ConnectTo) -> None:
        self.error: BaseException | None = None
        self._daemon: Daemon | None = None
        self._stop = threading.Event()
        data = {"source": "digits", "partition": "iid", "part": part}
        file = parse_table(DeviceFile, {"data": data, "limits": {"memory": "2GB"}}, source="test")
        self._arguments: Json = {"bundle": bundle, "device_file": file, "state_dir": folder, "connect": connect}
        self._thread = threading.Thread(target=self._run, name=bundle.device, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._daemon = Daemon(**self._arguments)  # in this thread: a database belongs to the thread that opened it
            if not self._stop.is_set():
                self._daemon.run()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        """End it; raises what it died of."""
        self._stop.set()
        if self._daemon is not None:
            self._daemon.request_stop()
        self._thread.join(15)
        assert not self._thread.is_alive(), "the client did not end"
        if self.error is not None:
            raise self.error


def hashes(shown: Json) -> list[str]:
    """The model's hash after every round, the first one before round 1."""
    return [model["sha256"] for model in shown["models"]]


class Undisturbed:
    """Runs of the devices a and b that nobody disturbs; each is made once for all processes of a test session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def hashes(self, *, rounds: int, hidden: int = 16, codec: str = "fp32") -> list[str]:
        """The model's hash after every round, the first one before round 1."""
        folder = self._folder / f"undisturbed-{rounds}-{hidden}-{codec}"
        folder.mkdir(exist_ok=True)
        made = folder / "hashes.json"
        with open(folder / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
            if not made.exists():
                file = mlp_run(rounds=rounds, codec=codec, model={"hidden": [hidden]})
                made.write_text(json.dumps(self._make(Path(tempfile.mkdtemp(dir=folder)), file)))
            found: list[str] = json.loads(made.read_text())
        return found

    def _make(self, folder: Path, file: RunFile) -> list[str]:
        with Fleet(folder) as fleet:
            fleet.start_coordinator()
            fleet.add_devices("a", "b")
            fleet.start_device("a")
            fleet.start_device("b")
            shown = fleet.wait_finished(fleet.start_run(file), 30 * file.stop.rounds)
            assert shown["state"] == "finished", shown["reason"]
            return hashes(shown)
