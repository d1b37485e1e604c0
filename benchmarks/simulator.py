"""The simulator against a plain PyTorch loop that does the same local training: 20 devices, one worker, one thread.

Both train the same model on the same samples per device, with the same batches and steps, and judge it after every
round. The simulator moreover plans, encodes, sends, checks, stores and folds. Its first round, which also loads torch,
is left out, and so is the loop's. Runs alternate, so that both meet the same load of the machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.federation import scratch
from benchmarks.figures import Figure
from benchmarks.thousand_virtual import Rounds
from coordinator import simulation_data
from coordinator.simulation import Processes, Setup, simulate
from coordinator.simulation_data import Prepared
from coordinator.worker_pool import WorkerPool
from edge_client.files import parse_table
from edge_client.run_file import RunFile

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
    overhead = tuple(s / p - 1 for s, p in zip(alone, plain, strict=True))
    each = tuple(1000 * (s - p) / _NUM_DEVICES for s, p in zip(alone, plain, strict=True))
    return [
        Figure(name="plain loop, round of 20 devices", unit="s", values=tuple(plain)),
        Figure(name="simulator with one worker", unit="s", values=tuple(alone)),
        Figure(name="overhead", unit="of the loop", values=overhead, at_most=_GOAL),
        Figure(name="overhead of one assignment", unit="ms", values=each),
        Figure(name="simulator with two workers", unit="s", values=tuple(both)),
    ]


def _run_file(rounds: int) -> RunFile:
    table: dict[str, Any] = {
        "name": "bench",
        "model": {"name": "small-cnn", "input": [1, 8, 8], "width": 64},
        "classes": [str(digit) for digit in range(10)],
        "train": {"batch": 32, "epochs": 10, "lr": 0.05, "momentum": 0.9},
        "stop": {"rounds": rounds},
        "evaluate": {"on": "simulate"},
        "simulate": {"data": "digits", "partition": "dirichlet:0.5", "devices": _NUM_DEVICES},
    }
    return parse_table(RunFile, table, source="benchmark")


def _simulated(file: RunFile, data: Prepared, folder: Path, processes: Processes) -> float:
    watch = Rounds()
    simulate(Setup(file=file, folder=folder, data=data), processes, watch)
    return statistics.median(watch.seconds[1:])


def _plain(run: Path, data: Prepared, rounds: int) -> float:
    command = [sys.executable, "-m", "benchmarks.plain_loop", str(run), data.path, data.parts, str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return float(statistics.median(json.loads(done.stdout)["seconds"][1:]))
