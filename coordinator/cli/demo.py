"""`coordinator demo`: a broker, a coordinator and four devices, real processes on this machine, train a model together.

Each device is started from its join bundle, in a state directory of its own, with a memory budget that makes its plan
differ from the others'. One of them is killed while it trains, and started again. Covers: the processes and the result.
Does not cover: what is printed meanwhile (`demo_story`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator import control
from coordinator.cli.demo_story import Interruption, Story
from coordinator.control_messages import AddDevices, GetStatus, ShowRun, StartRun
from coordinator.dashboard import messages
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
from edge_client.planning.planner import Request, choose
from edge_client.planning.rows import ModelRows
from edge_client.records import PlanRules

__all__ = ["DemoOptions", "DemoResult", "describe", "run_demo", "run_file"]

DEVICES = ("pi-zero", "pi-4", "jetson-nano", "gpu-host")  # the smallest first
_KILLED = "pi-4"
_KILLED_IN_ROUND = 3
_DOWN_S = 3.0
_FULL_SHARE = 1.5  # of what training everything at once adds to a worker, on the device that need not save
_DATA_BYTES = 50_000  # of a device's digits
_START_S = 30.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of `coordinator demo`."""

    rounds: int = 5
    seed: int = 1
    tls: bool = False
    keep: Path | None = None
    keep_open: bool = False  # its live page can be looked at afterwards
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
        "train": {"batch": 32, "epochs": 3, "lr": 0.1, "momentum": 0.9, "schedule": "cosine"},
        "stop": {"rounds": rounds},
        "devices": {"min": num_devices},
        "rounds": {"deadline": "10min"},
    }
    return parse_table(RunFile, table, source="demo")


def run_demo(options: DemoOptions, show: Callable[[DemoResult], None] = lambda result: None) -> DemoResult:
    """Run it, `show` the result and return it; progress goes to standard error."""
    with contextlib.ExitStack() as stack:
        if options.keep is not None:
            folder = options.keep
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedfit-demo-")))
        story = Story()
        story.title()
        state_dir = folder / "coordinator"
        processes = stack.enter_context(_processes())
        with story.waiting("the coordinator and four devices start"):
            processes["the coordinator"] = _start_coordinator(state_dir, folder, tls=options.tls)
            _wait_for(state_dir, processes)
            story.page(messages.ask(state_dir, messages.MakeLink()).url)
            bundles = control.ask(state_dir, AddDevices(names=DEVICES)).bundles
            file = run_file(rounds=options.rounds, seed=options.seed, num_devices=len(DEVICES))
            budgets = _budgets(file)
            for index, bundle in enumerate(bundles):
                part, budget_bytes = (index, len(DEVICES)), budgets[bundle.device]
                _write_home(_rerouted(bundle, options.through), folder, part, options.seed, budget_bytes)
                processes[bundle.device] = _start_device(bundle.device, folder)
            run = control.ask(state_dir, StartRun(file=file)).run
        down: set[str] = set()
        interruption = _interruption(folder, processes, down) if options.rounds >= _KILLED_IN_ROUND else None
        story.follow(
            state_dir,
            run,
            interruption=interruption,
            check_processes=lambda: _check_alive(processes, down),
            lacks=lambda: frozenset(down),
        )
        result = _result(control.ask(state_dir, ShowRun(run=run, newest=options.rounds + 1, report=True)), options)
        if options.keep is not None:
            result = replace(result, report=_report(state_dir, run, options.keep))
        show(result)
        if options.keep_open:
            story.stay_open(lambda: _check_alive(processes))
        return result


def _interruption(folder: Path, processes: dict[str, _Process], down: set[str]) -> Interruption:
    """One device dies as in a power cut, and comes back."""

    def kill() -> None:
        down.add(_KILLED)
        processes[_KILLED].process.kill()
        processes[_KILLED].process.wait()

    def start() -> None:
        processes[_KILLED] = _start_device(_KILLED, folder)
        down.discard(_KILLED)

    return Interruption(_KILLED, round=_KILLED_IN_ROUND, pause_s=_DOWN_S, kill=kill, start=start)


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
    process: subprocess.Popen[bytes]
    log_file: Path


@contextlib.contextmanager
def _processes() -> Iterator[dict[str, _Process]]:
    """Processes that end when the demo ends, however it ends."""
    running: dict[str, _Process] = {}
    try:
        yield running
    finally:
        for started in reversed(running.values()):
            started.process.send_signal(signal.SIGTERM)
        for started in running.values():
            try:
                started.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                started.process.kill()
                started.process.wait()


def _check_alive(processes: Mapping[str, _Process], down: AbstractSet[str] = frozenset()) -> None:
    for name, started in processes.items():
        if name not in down and started.process.poll() is not None:
            lines = started.log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise MachineError(f"{name} ended: {lines[-1] if lines else 'it printed nothing'}")


def _spawn(arguments: list[str], log_file: Path) -> _Process:
    parent = os.getpid()
    with open(log_file, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: guard.die_with_parent(parent),  # a demo that is killed leaves nothing behind
        )
    return _Process(process, log_file)


def _start_coordinator(state_dir: Path, folder: Path, *, tls: bool) -> _Process:
    arguments = ["coordinator", "start", "--state-dir", str(state_dir), "--listen", "127.0.0.1", "--port", "0"]
    arguments += ["--heartbeat", "1", "--page", "127.0.0.1:0"]
    return _spawn(arguments + (["--tls"] if tls else []), folder / "coordinator.log")


def _wait_for(state_dir: Path, processes: Mapping[str, _Process]) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        _check_alive(processes)
        with contextlib.suppress(control.NotRunningError):
            control.ask(state_dir, GetStatus())
            return
        time.sleep(0.05)
    raise MachineError(
        f"the coordinator did not answer within {_START_S:g} s; see {processes['the coordinator'].log_file}"
    )


def _budgets(file: RunFile) -> dict[str, int]:
    """The budget of each device's worker, from what the model takes on this machine, which is measured once.

    Each lies half way between what its plan takes and what the next larger plan takes.
    """
    assert file.model is not None
    rules = plan_rules(file.method.name, file.method.parameters)
    rows = calibrated(job_for(file, rules, file.model.input), durable.cache_dir())
    plans = _plans_by_size(rows, Workload.of(file.train, rules), rules)
    return {name: rows.worker_bytes + _DATA_BYTES + num for name, num in zip(DEVICES, plans[::-1], strict=True)}


def _plans_by_size(rows: ModelRows, workload: Workload, rules: PlanRules) -> list[int]:
    """What training may take for four plans: everything at once, recomputed, few groups, twice as many or more."""
    above = training_bytes(rows, workload, Shape(microbatch=workload.batch))
    limits = [int(_FULL_SHARE * above)]
    num_groups = 0  # of the plan that was found last
    while len(limits) < len(DEVICES):
        request = Request(
            variants={"full": rows}, workload=workload, rules=rules, base_bytes=0, training_bytes=above - 1
        )
        chosen = choose(request).chosen
        groups = len(chosen.shape.groups)
        is_next = bool(chosen.shape.recompute) if len(limits) == 1 else groups >= max(1, 2 * num_groups)
        if is_next and chosen.shape.microbatch == workload.batch and not chosen.shape.skipped:
            limits.append((chosen.training_bytes + above) // 2)
            num_groups = groups
        above = chosen.training_bytes
    return limits


def _write_home(bundle: identity.Bundle, folder: Path, part: tuple[int, int], seed: int, budget_bytes: int) -> None:
    """What a device has, as on a real one: a bundle, a device.toml; nothing else is shared."""
    home = folder / bundle.device
    home.mkdir(exist_ok=True)
    identity.write_bundle(home / "device.join", bundle)
    (home / "device.toml").write_text(
        f'data = {{ source = "digits", partition = "dirichlet:1", part = [{part[0]}, {part[1]}], seed = {seed} }}\n'
        f"limits = {{ memory = {budget_bytes} }}\n",
        encoding="utf-8",
    )


def _start_device(name: str, folder: Path) -> _Process:
    home = folder / name
    files = ["--join", str(home / "device.join"), "--config", str(home / "device.toml")]
    arguments = ["edge_client", "start", *files, "--state-dir", str(home / "state")]
    return _spawn(arguments, home / "edge-client.log")


def _result(data: RunDetails, options: DemoOptions) -> DemoResult:
    if data.state != "finished" or not data.models:
        raise RunFailedError(f"the demo's run ended {data.state}: {data.reason}")
    for row in data.updates_by_round or ():
        if row.num_updates != len(DEVICES):
            raise RunFailedError(f"round {row.round} counted {row.num_updates} updates of {len(DEVICES)} devices")
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
    """How near the devices came to their budgets, and what to do next."""
    nearest = max(result.devices, key=lambda device: device.peak_bytes / max(1, device.budget_bytes))
    share = 100 * nearest.peak_bytes // max(1, nearest.budget_bytes)
    peak, budget = format_bytes(nearest.peak_bytes).removesuffix(" MB"), format_bytes(nearest.budget_bytes)
    inside = all(device.inside_budget for device in result.devices)
    verdict = "Every device stayed inside its budget" if inside else "NOT every device stayed inside its budget"
    return "\n".join(
        [
            "",
            f"Highest peak: {share} % of a budget ({nearest.id}, {peak} of {budget}).",
            f"{verdict}; no update was lost or counted twice.",
            "",
            *([f"Report: {result.report}", ""] if result.report else []),
            "Next: your own devices      docs/tutorials/first-fleet.md",
            "      your own photographs  coordinator new photos --data DIR",
            "      without any device    coordinator simulate",
        ]
    )
