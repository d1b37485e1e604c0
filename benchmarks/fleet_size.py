"""What a fleet of ten thousand devices costs one machine, against one of a hundred, and who looks at it.

Light devices (`light_devices`) in this process, a real coordinator and broker; the state is where `FEDFIT_BENCH_DIR`
says, on a disk or in memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.federation import SMALL, Federation, cpu_s, rss_mb, run_file, scratch
from benchmarks.figures import Figure
from benchmarks.light_devices import LightFleet
from coordinator.control_messages import ListDevices, ListRuns, ShowRun, StartRun
from edge_client.config.run_file import RunFile

__all__ = ["rounds", "storm", "viewer"]

_PARTICIPANTS = 1000
_IDLE_S = 20.0


def _open_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def _connected(num: int) -> Iterator[tuple[Federation, LightFleet]]:
    """A federation of light devices, all let in."""
    _open_files()
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, Federation(Path(folder)) as federation:
        federation.start()
        federation.enrol(num)
        fleet = LightFleet(federation.bundles.values(), Path(folder) / "parts")
        federation.wait_until(lambda: _turns(fleet, 0.2) and fleet.num_online == num, 600, poll_s=0)
        _turns(fleet, 5.0)
        try:
            yield federation, fleet
        finally:
            fleet.close()


def _turns(fleet: LightFleet, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        fleet.turn(0.05)
    return True


def _pids(federation: Federation) -> dict[str, int]:
    pids = {"coordinator": federation.pid("coordinator"), "broker": federation.broker_pid()}
    aggregator = federation.aggregator_pid()
    return pids | ({"aggregator": aggregator} if aggregator is not None else {})


def _cpu(federation: Federation) -> dict[str, float]:
    """CPU seconds of each process; of the coordinator its loop, because our questions are answered beside it."""
    return {
        name: _thread_cpu_s(pid) if name == "coordinator" else cpu_s(pid) for name, pid in _pids(federation).items()
    }


def _file(num: int, num_rounds: int) -> RunFile:
    """Rounds that want a thousand updates, or as many as there are devices."""
    file = run_file(hidden=SMALL, rounds=num_rounds, devices=min(num, _PARTICIPANTS))
    return replace(file, devices=replace(file.devices, fraction=min(1.0, _PARTICIPANTS / num)))


def rounds(*, quick: bool) -> list[Figure]:
    """Idle memory and CPU time of ten thousand devices; CPU time per update with them and with a hundred; syncs."""
    large = 2000 if quick else 10_000
    small_cpu, _, _, _ = _of(100, num_rounds=10, measures_idle=False)
    cpu, memory, idle_cpu, (syncs, seconds) = _of(large, num_rounds=3, measures_idle=True)
    ratio = cpu["coordinator"] / small_cpu["coordinator"]
    return [
        Figure(name=f"{large} connected, idle: coordinator + broker RSS", unit="MB", values=(memory,), at_most=1200),
        Figure(
            name=f"{large} connected, idle: broker, CPU per second",
            unit="s",
            values=(idle_cpu["broker"],),
            at_most=0.05,
        ),
        Figure(
            name=f"{large} connected, idle: coordinator, CPU per second", unit="s", values=(idle_cpu["coordinator"],)
        ),
        *(
            Figure(
                name=f"{large} connected, {name}, CPU per update", unit="ms", values=(value,), at_most=_GOALS.get(name)
            )
            for name, value in cpu.items()
        ),
        *(
            Figure(name=f"100 connected, {name}, CPU per update", unit="ms", values=(v,))
            for name, v in small_cpu.items()
        ),
        Figure(name=f"coordinator's loop, CPU per update: {large} against 100", unit="", values=(ratio,), at_most=1.3),
        Figure(name="syncs of the coordinator per update", unit="", values=(syncs,), at_most=0.5),
        Figure(name=f"{large} connected, round of {_PARTICIPANTS}", unit="s", values=seconds),
    ]


_GOALS = {"coordinator": 1.5, "aggregator": 0.7}


def _of(
    num: int, *, num_rounds: int, measures_idle: bool
) -> tuple[dict[str, float], float, dict[str, float], tuple[float, tuple[float, ...]]]:
    """CPU ms per update by process, without what the idle fleet costs; idle RSS in MB; idle CPU per second; syncs per
    update and the rounds' seconds.
    """
    with _connected(num) as (federation, fleet):
        idle_s = _IDLE_S if measures_idle else 5.0
        before = _cpu(federation)
        _turns(fleet, idle_s)
        idle_cpu = {name: (spent - before[name]) / idle_s for name, spent in _cpu(federation).items()}
        memory = sum(rss_mb(pid) for pid in _pids(federation).values())
        _run(federation, fleet, _file(num, 1))  # the aggregator loads torch
        before, began = _cpu(federation), time.monotonic()
        run = _run(federation, fleet, _file(num, num_rounds))
        # heartbeats go on whatever a round costs, and longer on a busy machine
        after, idle_ms = _cpu(federation), 1000 * (time.monotonic() - began)
        num_updates = _num_updates(federation, run)
        cpu = {
            name: (1000 * (spent - before[name]) - idle_ms * idle_cpu.get(name, 0.0)) / num_updates
            for name, spent in after.items()
        }
        seconds = tuple(federation.round_seconds(run))
        syncs = 0.0
        if measures_idle:
            syncs = _syncs(
                federation.pid("coordinator"), lambda: _num_updates(federation, _run(federation, fleet, _file(num, 1)))
            )
    return cpu, memory, idle_cpu, (syncs, seconds)


def _run(federation: Federation, fleet: LightFleet, file: RunFile) -> str:
    """The id of a run that has ended; asks no more of the coordinator than that takes."""
    run = federation.ask(StartRun(file=file)).run

    def is_over() -> bool:
        _turns(fleet, 0.2)
        return federation.ask(ListRuns()).runs[-1].state not in ("queued", "running")

    federation.wait_until(is_over, 900, poll_s=0)
    return run


def _num_updates(federation: Federation, run: str) -> int:
    """How many updates a finished run stored."""
    details = federation.ask(ShowRun(run=run, report=True))
    if details.state != "finished":
        raise RuntimeError(f"the run ended {details.state}: {details.reason}\n{federation.tail()}")
    return sum(updates.num_updates for updates in details.updates_by_round or ())


def _syncs(pid: int, work: Callable[[], int]) -> float:
    """Calls of fsync and fdatasync while this is done, per update."""
    with tempfile.NamedTemporaryFile() as counts:
        command = ["strace", "-f", "-c", "-e", "trace=fsync,fdatasync", "-o", counts.name, "-p", str(pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(1.0)
        num_updates = work()
        tracer.send_signal(signal.SIGINT)
        tracer.wait(20)
        lines = Path(counts.name).read_text(encoding="ascii", errors="replace").splitlines()
    calls = [int(line.split()[3]) for line in lines if re.search(r"\b(fsync|fdatasync)$", line)]
    return sum(calls) / num_updates


def storm(*, quick: bool) -> list[Figure]:
    """Hellos per device while many connect and the coordinator is held for ten seconds."""
    num = 500 if quick else 2000
    _open_files()
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, Federation(Path(folder)) as federation:
        federation.start()
        federation.enrol(num)
        os.kill(federation.pid("coordinator"), signal.SIGSTOP)
        fleet = LightFleet(federation.bundles.values(), Path(folder) / "parts")
        _turns(fleet, 10.0)
        os.kill(federation.pid("coordinator"), signal.SIGCONT)
        federation.wait_until(lambda: _turns(fleet, 0.2) and fleet.num_online == num, 300, poll_s=0)
        _turns(fleet, 5.0)
        hellos = sum(" is here (client" in line for _, line in federation.said("coordinator"))
        fleet.close()
    return [
        Figure(
            name=f"hellos per device, {num} of them, loop held for 10 s", unit="", values=(hellos / num,), at_most=1.2
        )
    ]


def viewer(*, quick: bool) -> list[Figure]:
    """CPU time that one viewer adds to the loop's thread each second: `--follow` on a terminal, and a run in detail."""
    num, num_rounds = (200, 3) if quick else (1000, 3)
    with _connected(num) as (federation, fleet):
        trained = _run(federation, fleet, _file(num, num_rounds))
        waiting = federation.ask(StartRun(file=run_file(hidden=SMALL, rounds=1, devices=num + 1))).run
        _turns(fleet, 2.0)

        def look() -> None:
            federation.ask(ShowRun(run=waiting, after=-1))
            federation.ask(ListDevices(limit=50))
            federation.ask(ShowRun(run=trained, newest=5))
            _turns(fleet, 0.5)

        look()
        alone = _loop_cpu(federation.pid("coordinator"), lambda: _turns(fleet, 0.5), 20.0)
        watched = _loop_cpu(federation.pid("coordinator"), look, 20.0)
    name = f"one viewer of {num} devices and {num_rounds} rounds, CPU of the loop's thread per second"
    return [Figure(name=name, unit="s", values=(max(0.0, watched - alone),), at_most=0.02)]


def _loop_cpu(pid: int, step: Callable[[], object], seconds: float) -> float:
    """CPU seconds of the process's first thread, per second, while `step` is done again and again."""
    began, before = time.monotonic(), _thread_cpu_s(pid)
    while time.monotonic() < began + seconds:
        step()
    return (_thread_cpu_s(pid) - before) / (time.monotonic() - began)


def _thread_cpu_s(pid: int) -> float:
    text = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii")
    return int(text.split()[0]) / 1e9
