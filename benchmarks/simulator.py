"""The simulator against a plain PyTorch loop that does the same local training: 20 devices, one worker, one thread.

Both train the same model on the same samples per device, with the same batches and steps, and judge it after every
round. The simulator moreover plans, encodes, sends, checks, stores and folds. Its first round, which also loads torch,
is left out, and so is the loop's. Runs alternate, so that both meet the same load of the machine; CPU seconds hardly
depend on it.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.federation import cpu_s, scratch
from benchmarks.figures import Figure
from coordinator.simulation import data as simulation_data
from coordinator.simulation.data import Prepared
from coordinator.simulation.simulation import Processes, Setup, simulate
from coordinator.simulation.worker_pool import WorkerPool
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table

__all__ = ["measure"]

_NUM_DEVICES = 20
_GOAL = 0.15


def measure(*, quick: bool) -> list[Figure]:
    """Medians of rounds, pair by pair."""
    rounds, repeats = (2, 1) if quick else (3, 3)
    file = _run_file(rounds)
    one, two = Processes(WorkerPool(1)), Processes(WorkerPool(2))
    plain, alone, both = [], [], []
    try:
        with tempfile.TemporaryDirectory(dir=scratch()) as name:
            folder = Path(name)
            data = simulation_data.prepare(file, folder / "data")
            for repeat in range(repeats):
                alone.append(_simulated(file, data, folder / f"one-{repeat}", one))
                plain.append(_plain(folder / f"one-{repeat}" / "run.toml", data, rounds))
                both.append(_simulated(file, data, folder / f"two-{repeat}", two))
    finally:
        one.close()
        two.close()
    overhead = tuple(s.seconds / p.seconds - 1 for s, p in zip(alone, plain, strict=True))
    return [
        Figure(name="plain loop, round of 20 devices", unit="s", values=tuple(p.seconds for p in plain)),
        Figure(name="simulator with one worker", unit="s", values=tuple(s.seconds for s in alone)),
        Figure(name="overhead", unit="of the loop", values=overhead, at_most=_GOAL),
        Figure(name="plain loop, CPU", unit="s", values=tuple(p.cpu_s for p in plain)),
        Figure(name="worker, CPU", unit="s", values=tuple(s.worker_cpu_s for s in alone)),
        Figure(name="coordinator and aggregator, CPU", unit="s", values=tuple(s.cpu_s - s.worker_cpu_s for s in alone)),
        Figure(name="simulator with two workers", unit="s", values=tuple(s.seconds for s in both)),
    ]


class _Round(NamedTuple):
    """The median of a run's rounds but for its first."""

    seconds: float
    cpu_s: float  # of all processes
    worker_cpu_s: float = 0.0


class _Watch:
    """Seconds and CPU of each round."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._lines: list[tuple[float, float, float]] = []

    def moved(self, round_: int, done: int, asked: int) -> None:
        """Nothing."""

    def round_done(self, line: dict[str, Any]) -> None:
        """A round has ended."""
        workers = sum(cpu_s(pid) for pid in self._processes.pool.pids())
        aggregator = self._processes.aggregator.pid
        others = sum(os.times()[:2]) + (cpu_s(aggregator) if aggregator is not None else 0.0)
        self._lines.append((line["seconds"], workers + others, workers))

    def median(self) -> _Round:
        """Of the rounds after the first."""
        spans = [(b[0], b[1] - a[1], b[2] - a[2]) for a, b in itertools.pairwise(self._lines)]
        return _Round(*(statistics.median(span[i] for span in spans) for i in range(3)))


def _run_file(rounds: int) -> RunFile:
    table: dict[str, Any] = {
        "name": "bench",
        "model": {"name": "small-cnn", "input": [1, 8, 8], "width": 64},
        "classes": [str(digit) for digit in range(10)],
        "train": {"batch": 32, "epochs": 5, "lr": 0.05, "momentum": 0.9},
        "stop": {"rounds": rounds},
        "evaluate": {"on": "simulate"},
        "simulate": {"data": "digits", "partition": "dirichlet:0.5", "devices": _NUM_DEVICES},
    }
    return parse_table(RunFile, table, source="benchmark")


def _simulated(file: RunFile, data: Prepared, folder: Path, processes: Processes) -> _Round:
    watch = _Watch(processes)
    simulate(Setup(file=file, folder=folder, data=data), processes, watch)
    return watch.median()


def _plain(run: Path, data: Prepared, rounds: int) -> _Round:
    command = [sys.executable, "-m", "benchmarks.plain_loop", str(run), data.path, data.parts, str(rounds)]
    done = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return _Round(*(statistics.median(done[name][1:]) for name in ("seconds", "cpu_s")))
