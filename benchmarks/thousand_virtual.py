"""10, 100 and 1,000 virtual devices with a 1 MB model and no training: seconds of a round, memory of the simulator.

`python -m benchmarks.thousand_virtual NUM ROUNDS FOLDER` is one fleet in a process of its own, whose peak is its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.federation import cpu_s, peak_mb, scratch
from benchmarks.figures import Figure
from coordinator.aggregation.job_child import JobChild
from coordinator.simulation.data import Prepared
from coordinator.simulation.simulation import Processes, Setup, simulate
from coordinator.simulation.worker_pool import WorkerPool
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table

__all__ = ["measure"]

Json = dict[str, Any]

HIDDEN = [464, 464]  # on 8 x 8 inputs and 10 classes: 250,570 parameters, 1.0 MB as fp32
_NUM_WORKERS = 2


def measure(*, quick: bool) -> list[Figure]:
    """One fleet after another; the first round also loads torch into the aggregator, and is left out."""
    rounds = 2 if quick else 3
    figures: list[Figure] = []
    for num in (10, 100) if quick else (10, 100, 1000):
        found = _fleet(num, rounds)
        figures.append(Figure(name=f"{num} devices, round with 1 MB", unit="s", values=tuple(found["seconds"][1:])))
        figures.append(Figure(name=f"{num} devices, CPU of all processes", unit="s", values=(found["cpu_s"],)))
        for name, mb in found["peaks"].items():
            figures.append(Figure(name=f"{num} devices, {name}, peak RSS", unit="MB", values=(mb,)))
    return figures


def _fleet(num: int, rounds: int) -> Json:
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        command = [sys.executable, "-m", "benchmarks.thousand_virtual", str(num), str(rounds), folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: Json = json.loads(done.stdout)
    return found


class _Rounds:
    """Remembers how long each round took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def moved(self, round_: int, done: int, asked: int) -> None:
        """Nothing."""

    def round_done(self, line: Json) -> None:
        """A round has ended."""
        self.seconds.append(line["seconds"])


def _run_file(num: int, rounds: int) -> RunFile:
    table = {
        "name": "bench",
        "model": {"name": "mlp", "input": [1, 8, 8], "hidden": HIDDEN},
        "classes": [str(digit) for digit in range(10)],
        "stop": {"rounds": rounds},
        "rounds": {"max-norm-ratio": 1e9},
        "evaluate": {"every": 0},
        "simulate": {"data": "digits", "devices": num},
    }
    return parse_table(RunFile, table, source="benchmark")


def main() -> int:
    """One fleet; figures as JSON on standard output."""
    num, rounds, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    processes = Processes(WorkerPool(_NUM_WORKERS, module="benchmarks.no_training_pool"))
    watch = _Rounds()
    nothing = Prepared(path="", parts="", sizes=(), num_test=0)  # nobody opens it
    try:
        simulate(Setup(file=_run_file(num, rounds), folder=folder / "run", data=nothing), processes, watch)
        aggregator = _pid(processes.aggregator)
        cpu = sum(os.times()[:2]) + cpu_s(aggregator) + sum(cpu_s(pid) for pid in processes.pool.pids())
        peaks = {"simulator": peak_mb(os.getpid()), "aggregator": peak_mb(aggregator)}
    finally:
        processes.close()
    json.dump({"seconds": watch.seconds, "cpu_s": cpu, "peaks": peaks}, sys.stdout)
    return 0


def _pid(child: JobChild) -> int:
    assert child.pid is not None
    return child.pid


if __name__ == "__main__":
    sys.exit(main())
