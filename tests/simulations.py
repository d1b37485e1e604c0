"""Simulations in the process of the test, all with the one worker and the one aggregator of the caller."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from coordinator.simulation import data as simulation_data
from coordinator.simulation.run_options import Flags, combinations, complete
from coordinator.simulation.simulation import Processes, Setup, simulate
from coordinator.simulation.worker_pool import WorkerPool


class Silent:
    """Nobody watches."""

    def moved(self, round_: int, done: int, asked: int) -> None:
        """Nothing."""

    def round_done(self, line: dict[str, Any]) -> None:
        """Nothing."""


def shared_processes() -> contextlib.closing[Processes]:
    """One worker and one aggregator: torch is loaded twice, however many runs there are."""
    return contextlib.closing(Processes(WorkerPool(1)))


def simulated(folder: Path, processes: Processes, **flags: Any) -> dict[str, Any]:
    """The result of a run in `folder/run`; the flags are those of `coordinator simulate`."""
    (combination,) = combinations(Flags(**flags))
    section = combination.table["simulate"]
    file = complete(combination, simulation_data.describe(section["data"], section.get("partition", "")))
    data = simulation_data.prepare(file, folder / "data")
    return simulate(Setup(file=file, folder=folder / "run", data=data), processes, Silent())
