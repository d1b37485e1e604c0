"""`coordinator demo`: a broker, a coordinator and four devices, real processes on this machine, train a model together.

Each device is started from its join bundle, in a state directory of its own, with a memory budget of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator import control
from coordinator.cli import follow
from coordinator.cli.tables import run_devices
from coordinator.control_messages import AddDevices, GetStatus, StartRun
from coordinator.results import run_record
from coordinator.run_details import OMIT_NONE, RunDetails, RunDevice
from edge_client import durable
from edge_client.client import identity
from edge_client.config.quantities import format_bytes
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.device import guard
from edge_client.errors import MachineError, RunFailedError
from edge_client.measuring.calibration import calibrated, job_for
from edge_client.methods.registry import plan_rules
from edge_client.planning.cost import Shape, Workload, training_bytes

__all__ = ["DemoOptions", "DemoResult", "describe", "run_demo", "run_file"]

# name -> what training may add to a worker, as a share of what training everything at once adds: the first has to train
# in groups and in smaller pieces, the second in groups, the third to make activations again
DEVICES = {"pi-zero": 0.32, "pi-4": 0.55, "jetson-nano": 0.75, "gpu-host": 1.5}
_DATA_BYTES = 10**6  # of a device's digits
_START_S = 30.0
_STOP_S = 10.0
_MAX_ABANDONED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of `coordinator demo`."""

    rounds: int = 5
    seed: int = 1
    tls: bool = False
    keep: Path | None = None
    through: str | None = None  # host:port that devices connect to instead of the broker's own


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What came of the demo's run."""

    rounds: int
    accuracy: float
    accuracy_before: float
    accuracy_per_round: tuple[float, ...]
    bytes_up: int
    bytes_down: int
    devices: tuple[RunDevice, ...]
    model_sha256: str
    report: str | None = field(default=None, metadata=OMIT_NONE)


def run_file(*, rounds: int, seed: int, num_devices: int) -> RunFile:
    """The demo's run: FeDepth on the 8x8 digits."""
    table = {
        "name": "demo",
        "seed": seed,
        "method": "fedepth",
        "model": {"name": "preresnet20", "input": [1, 8, 8], "track-running-stats": True},
        "classes": [str(digit) for digit in range(10)],
        "train": {"batch": 128, "epochs": 6, "lr": 0.1, "momentum": 0.9},
        "stop": {"rounds": rounds},
        "devices": {"min": num_devices},
        "rounds": {"deadline": "10min"},
    }
    return parse_table(RunFile, table, source="demo")


def run_demo(options: DemoOptions) -> DemoResult:
    """Run it and return the result; progress goes to standard error."""
    with contextlib.ExitStack() as stack:
        if options.keep is not None:
            folder = options.keep
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedfit-demo-")))
        state_dir = folder / "coordinator"
        processes = stack.enter_context(_processes())
        processes.append(_start_coordinator(state_dir, folder, tls=options.tls))
        _wait_for(state_dir, processes)
        names = list(DEVICES)
        bundles = control.ask(state_dir, AddDevices(names=tuple(names))).bundles
        file = run_file(rounds=options.rounds, seed=options.seed, num_devices=len(names))
        budgets = _budgets(file)
        for index, bundle in enumerate(bundles):
            part, budget_bytes = (index, len(names)), budgets[bundle.device]
            bundle = _rerouted(bundle, options.through)
            processes.append(_start_device(bundle, folder, part=part, seed=options.seed, budget_bytes=budget_bytes))
        run = control.ask(state_dir, StartRun(file=file)).run

        def check(data: RunDetails) -> None:
            _check_alive(processes)
            _check_rounds(data)

        shown = follow.follow(state_dir, run, check=check)
        result = _result(shown, options)
        return replace(result, report=_report(state_dir, run, options.keep)) if options.keep is not None else result


def _report(state_dir: Path, run: str, folder: Path) -> str:
    from coordinator.report import run_page as report  # loads the plots' library

    path = folder / f"{run}.html"
    report.write_page(report.render(run_record.fetch_record(state_dir, run)), path)
    return str(path)


def _rerouted(bundle: identity.Bundle, through: str | None) -> identity.Bundle:
    if through is None:
        return bundle
    scheme = bundle.brokers[0].partition("://")[0]
    return replace(bundle, brokers=(f"{scheme}://{through}",))


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    process: subprocess.Popen[bytes]
    log_file: Path


@contextlib.contextmanager
def _processes() -> Iterator[list[_Process]]:
    """Processes that end when the demo ends, however it ends."""
    running: list[_Process] = []
    try:
        yield running
    finally:
        for started in reversed(running):
            started.process.send_signal(signal.SIGTERM)
        for started in running:
            try:
                started.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                started.process.kill()
                started.process.wait()


def _check_alive(processes: list[_Process]) -> None:
    for started in processes:
        if started.process.poll() is not None:
            lines = started.log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise MachineError(f"{started.name} ended: {lines[-1] if lines else 'it said nothing'}")


def _spawn(name: str, arguments: list[str], log_file: Path) -> _Process:
    parent = os.getpid()
    with open(log_file, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: guard.die_with_parent(parent),  # a demo that is killed leaves nothing behind
        )
    return _Process(name, process, log_file)


def _start_coordinator(state_dir: Path, folder: Path, *, tls: bool) -> _Process:
    arguments = ["coordinator", "start", "--state-dir", str(state_dir), "--listen", "127.0.0.1", "--port", "0"]
    arguments += ["--heartbeat", "1"]
    return _spawn("the coordinator", arguments + (["--tls"] if tls else []), folder / "coordinator.log")


def _wait_for(state_dir: Path, processes: list[_Process]) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        _check_alive(processes)
        with contextlib.suppress(control.NotRunningError):
            control.ask(state_dir, GetStatus())
            return
        time.sleep(0.05)
    raise MachineError(f"the coordinator did not answer within {_START_S:g} s; see {processes[0].log_file}")


def _budgets(file: RunFile) -> dict[str, int]:
    """The budget of each device's worker, from what the model takes on this machine, which is measured once."""
    assert file.model is not None
    rules = plan_rules(file.method.name, file.method.parameters)
    rows = calibrated(job_for(file, rules, file.model.input), durable.cache_dir())
    section = file.train
    workload = Workload(batch=section.batch, optimizer=section.optimizer, momentum=section.momentum)
    full = training_bytes(rows, workload, Shape(microbatch=section.batch))
    return {name: rows.base_bytes + _DATA_BYTES + int(share * full) for name, share in DEVICES.items()}


def _start_device(
    bundle: identity.Bundle, folder: Path, *, part: tuple[int, int], seed: int, budget_bytes: int
) -> _Process:
    """As on a real device: a bundle, a device.toml, a state directory; nothing else is shared."""
    home = folder / bundle.device
    home.mkdir(exist_ok=True)
    identity.write_bundle(home / "device.join", bundle)
    (home / "device.toml").write_text(
        f'data = {{ source = "digits", partition = "dirichlet:0.5", part = [{part[0]}, {part[1]}], seed = {seed} }}\n'
        f"limits = {{ memory = {budget_bytes} }}\n",
        encoding="utf-8",
    )
    arguments = [
        "--join",
        str(home / "device.join"),
        "--config",
        str(home / "device.toml"),
        "--state-dir",
        str(home / "state"),
    ]
    return _spawn(bundle.device, ["edge_client", "start", *arguments], home / "edge-client.log")


def _check_rounds(data: RunDetails) -> None:
    """A fleet tries again and again; a demo gives up and reports why."""
    abandoned = [row for row in data.round_rows if row.state == "ABANDONED"]
    if len(abandoned) > _MAX_ABANDONED:
        last = abandoned[-1]
        raise RunFailedError(f"round {last.number} was abandoned again and again: {last.reason}")


def _result(data: RunDetails, options: DemoOptions) -> DemoResult:
    if data.state != "finished" or not data.models:
        raise RunFailedError(f"the demo's run ended {data.state}: {data.reason}")
    before, *per_round = (round(result.accuracy, 6) for result in data.evaluations)
    return DemoResult(
        rounds=options.rounds,
        accuracy=per_round[-1] if per_round else before,
        accuracy_before=before,
        accuracy_per_round=tuple(per_round),
        bytes_up=sum(device.bytes_up for device in data.devices),
        bytes_down=sum(device.bytes_down for device in data.devices),
        devices=data.devices,
        model_sha256=data.models[-1].sha256,
    )


def describe(result: DemoResult) -> str:
    """The results as a table, and how to continue with real devices."""
    accuracies = "  ".join(f"{value:.3f}" for value in (result.accuracy_before, *result.accuracy_per_round))
    up, down = format_bytes(result.bytes_up), format_bytes(result.bytes_down)
    inside = all(device.inside_budget for device in result.devices)
    return "\n".join(
        [
            f"accuracy on the devices' own test data, before round 1 and after each of {result.rounds} rounds:",
            f"  {accuracies}",
            "",
            run_devices(result.devices),
            "",
            f"every device stayed inside its budget: {'yes' if inside else 'NO'}",
            f"model {result.model_sha256[:16]}, {up} up, {down} down",
            "",
            *([f"report: {result.report}", ""] if result.report else []),
            "The same with your own devices (README.md has every step):",
            "  server  coordinator start --advertise ADDRESS",
            "          coordinator device add NAME ... --out bundles",
            "          coordinator new FOLDER --classes A,B,...",
            "  device  edge-client join NAME.join --data DIR, then: edge-client start",
            "  server  coordinator run start FOLDER/run.toml --dry-run, then --follow",
        ]
    )
