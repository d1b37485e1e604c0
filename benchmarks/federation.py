"""A federation of real processes on this machine, as the benchmarks need it, and when things happened in its logs."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil

from coordinator import control
from coordinator.control_messages import AddDevices, GetStatus, ListRuns, Request, ShowRun, StartRun
from coordinator.run_details import RunDetails
from edge_client.client import identity
from edge_client.config.device_file import DataSection
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.errors import MachineError

__all__ = [
    "BIG",
    "SMALL",
    "Federation",
    "RoundTimes",
    "cpu_of_all_s",
    "cpu_s",
    "peak_mb",
    "rss_mb",
    "run_file",
    "scratch",
]

A = TypeVar("A")

BIG = [1362] * 7  # hidden layers on 8 x 8 inputs and 10 classes: 11,240,596 parameters, 45.0 MB as fp32
SMALL = [13]  # 985 parameters, 3.9 kB
_ROOT = Path(__file__).resolve().parent.parent
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \w+ +\[[^]]*\] (.*)")


def run_file(*, hidden: Sequence[int], rounds: int, devices: int, codec: str = "fp32", seed: int = 1) -> RunFile:
    """A run of one step per round of an MLP on the digits, judged nowhere."""
    table = {
        "name": "bench",
        "seed": seed,
        "model": {"name": "mlp", "input": [1, 8, 8], "hidden": list(hidden)},
        "classes": [str(digit) for digit in range(10)],
        "train": {"batch": 16, "max-steps": 1, "lr": 0.01},
        "stop": {"rounds": rounds},
        "devices": {"min": devices},
        "rounds": {"deadline": "20min", "codec": codec, "max-norm-ratio": 1e9},
        "evaluate": {"every": 0},
    }
    return parse_table(RunFile, table, source="benchmark")


def rss_mb(pid: int) -> float:
    """Memory of a process that is in RAM now."""
    return _status_mb(pid, "VmRSS")


def peak_mb(pid: int) -> float:
    """Its largest RSS so far, or since `reset_peak`."""
    return _status_mb(pid, "VmHWM")


def _status_mb(pid: int, field: str) -> float:
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
        found = next(line for line in lines if line.startswith(f"{field}:"))
    return int(found.split()[1]) * 1024 / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """One round, in seconds since the epoch: the clock of all processes of a machine."""

    asked: float  # the first assignment goes out
    fetched: float  # the last device has all parts: its worker starts
    finished: float  # the first device has its update
    receipted: float  # the last device has its receipt
    committed: float

    @property
    def down_s(self) -> float:
        """From the first assignment to the last worker's start."""
        return self.fetched - self.asked

    @property
    def up_s(self) -> float:
        """From the first update to the last receipt."""
        return self.receipted - self.finished

    @property
    def between_s(self) -> float:
        """From the last worker's start to the first update; meaningful only where workers wait for one another."""
        return self.finished - self.fetched

    @property
    def round_s(self) -> float:
        """From the first assignment to the committed model."""
        return self.committed - self.asked


class Federation:
    """Processes below one folder: a coordinator with its broker, and devices."""

    def __init__(self, folder: Path, *, options: Sequence[str] = ()) -> None:
        """`options` go to `coordinator start`."""
        self.folder = folder
        self.state_dir = folder / "coordinator"
        self._options = options
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.bundles: dict[str, identity.Bundle] = {}
        self.reroute: str | None = None  # host:port that devices use instead of the broker's own

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._processes)):
            self.stop(name)

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=_ROOT
            )

    def start(self) -> float:
        """Start the coordinator; seconds until it answered."""
        began = time.monotonic()
        options = ["--state-dir", str(self.state_dir), "--listen", "127.0.0.1", "--port", "0", *self._options]
        self._spawn("coordinator", ["coordinator", "start", *options])
        self.wait_until(self._answers, 60, poll_s=0.005)
        return time.monotonic() - began

    def _answers(self) -> bool:
        with contextlib.suppress(MachineError):
            self.ask(GetStatus())
            return True
        return False

    def stop(self, name: str) -> None:
        """SIGTERM, then SIGKILL."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def pid(self, name: str) -> int:
        """Process id of the coordinator or a device."""
        return self._processes[name].pid

    def broker_pid(self) -> int:
        """Process id of the embedded broker."""
        return int((self.state_dir / "broker" / "nats.pid").read_text(encoding="ascii"))

    def broker_port(self) -> int:
        """Where the embedded broker listens."""
        return int(self.ask(GetStatus()).brokers[0].rpartition(":")[2])

    def aggregator_pid(self) -> int | None:
        """Process id of the aggregator, if there is one now."""
        children = psutil.Process(self.pid("coordinator")).children()
        return next((child.pid for child in children if "coordinator.aggregation.process" in child.cmdline()), None)

    def enrol(self, num: int) -> list[str]:
        """Add devices d000, d001, ..."""
        names = [f"d{i:03}" for i in range(len(self.bundles), len(self.bundles) + num)]
        for bundle in self.ask(AddDevices(names=tuple(names))).bundles:
            if self.reroute is not None:
                bundle = replace(bundle, brokers=(f"mqtt://{self.reroute}",))
            self.bundles[bundle.device] = bundle
        return names

    def start_device(self, name: str, *, training: bool, data: DataSection | None = None) -> None:
        """A client as on a real device; without `training` its workers send the model back.

        `data` is what it trains on: by default its part of the digits.
        """
        home = self.folder / name
        home.mkdir(exist_ok=True)
        identity.write_bundle(home / "device.join", self.bundles[name])
        if data is None:
            part = (list(self.bundles).index(name), len(self.bundles))
            data = DataSection(source="digits", partition="iid", part=part)
        section = f'source = "{data.source}", partition = "{data.partition}", part = {list(data.part)}'
        config = f'data = {{ {section}, test-fraction = {data.test_fraction} }}\nlimits = {{ memory = "2GB" }}\n'
        (home / "device.toml").write_text(config, encoding="utf-8")
        if not training:
            self._spawn(name, ["benchmarks.no_training_device", str(home), str(len(self.bundles))])
            return
        options = ["--join", str(home / "device.join"), "--config", str(home / "device.toml")]
        self._spawn(name, ["edge_client", "start", *options, "--state-dir", str(home / "state")])

    def start_devices(self, num: int, *, training: bool, data: Sequence[DataSection] = ()) -> list[str]:
        """Enrol and start devices, and wait until all are let in; `data` names what each trains on."""
        names = self.enrol(num)
        for number, name in enumerate(names):
            self.start_device(name, training=training, data=data[number] if data else None)
        self.wait_until(lambda: set(names) <= set(self.ask(GetStatus()).online), 120)
        return names

    def ask(self, request: Request[A]) -> A:
        """Ask the coordinator."""
        return control.ask(self.state_dir, request)

    def run(
        self, file: RunFile, *, while_running: Callable[[], object] | None = None, poll_s: float = 0.2
    ) -> RunDetails:
        """Start a run and wait for its end; `while_running` is called every `poll_s`."""
        run = self.ask(StartRun(file=file)).run

        def ended() -> bool:
            if while_running is not None:
                while_running()
            return self.ask(ListRuns()).runs[-1].state not in ("queued", "running")

        self.wait_until(ended, 900, poll_s=poll_s)
        shown = self.ask(ShowRun(run=run))
        if shown.state != "finished":
            raise RuntimeError(f"the run ended {shown.state}: {shown.reason}\n{self.tail()}")
        return shown

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, *, poll_s: float = 0.05) -> None:
        """Wait; raises with the ends of all logs if a process dies or the time is over."""
        until = time.monotonic() + timeout_s
        while not condition():
            dead = [name for name, process in self._processes.items() if process.poll() is not None]
            if dead or time.monotonic() > until:
                raise RuntimeError(f"{'ended: ' + ', '.join(dead) if dead else 'timeout'}\n{self.tail()}")
            time.sleep(poll_s)

    def tail(self) -> str:
        """The end of every log."""
        logs = sorted(self.folder.glob("*.log"))[:4]
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in logs)

    # when things happened

    def said(self, name: str) -> Iterator[tuple[float, str]]:
        """Moments and lines of a log."""
        for line in (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines():
            if found := _LINE.match(line):
                moment = datetime.datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f")
                yield moment.timestamp(), found[2]

    def rounds(self, run: str) -> list[RoundTimes]:
        """The times of a finished run's rounds, as coordinator and devices logged them."""
        asked = self._moments("coordinator", rf"run {run} round \d+: asks")
        committed = self._moments("coordinator", rf"run {run} round \d+: committed")
        started = [self._moments(name, rf"run {run} round \d+: worker") for name in self.bundles]
        finished = [self._moments(name, rf"run {run} round \d+: finished") for name in self.bundles]
        over = [self._moments(name, r"lease \w+ is over")[-len(asked) :] for name in self.bundles]
        return [
            RoundTimes(
                asked=asked[i],
                fetched=max(times[i] for times in started),
                finished=min(times[i] for times in finished),
                receipted=max(times[i] for times in over),
                committed=committed[i],
            )
            for i in range(len(asked))
        ]

    def round_seconds(self, run: str) -> list[float]:
        """Per round, from the first assignment to the committed model; all that the coordinator's log tells."""
        return [end - begin for begin, end in self.spans(run)]

    def spans(self, run: str) -> list[tuple[float, float]]:
        """Per round the moments of its first assignment and of its committed model."""
        asked = self._moments("coordinator", rf"run {run} round \d+: asks")
        committed = self._moments("coordinator", rf"run {run} round \d+: committed")
        return list(zip(asked, committed, strict=True))

    def _moments(self, name: str, pattern: str) -> list[float]:
        return [moment for moment, text in self.said(name) if re.match(pattern, text)]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def cpu_of_all_s(pid: int) -> float:
    """CPU seconds so far of a process, of those below it, and of their children that have ended."""
    process = psutil.Process(pid)
    all_times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in all_times))


def scratch() -> str | None:
    """Where state goes: a real disk, because durable writes are part of what is measured."""
    return os.environ.get("FEDFIT_BENCH_DIR")
