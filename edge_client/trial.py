"""Trains a few steps by a plan and measures them; a process of its own (`apart`), as a worker is.

Malloc is pinned, the model is built, laid out and warmed up; then the real loop trains with the method's client half
on random samples.

    base    RSS of the warm process
    peak    largest RSS while it trained, without the base

Covers: one trial. Does not cover: which plans are tried (`bench_command`, benchmarks).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client import apart
from edge_client.device import guard, meter
from edge_client.errors import MachineError
from edge_client.records import Count, Positive, TrainingPlan, from_map
from edge_client.run_file import RunFile

if TYPE_CHECKING:
    from edge_client.rehearsal import Rehearsal

__all__ = ["Measured", "Trial", "main", "measure", "tried"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What to train, and how."""

    run: RunFile
    input_shape: tuple[int, ...]
    plan: TrainingPlan
    task: str | None = None  # path of the task's file
    steps: Positive = 2  # of each group per epoch
    epochs: Positive = 1
    repeats: Count = 0  # times that the whole is done again for the clock
    limit_bytes: Count = 0  # that the process may grow by; 0: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a trial found."""

    base_bytes: Count
    peak_bytes: Count  # on top of the base
    seconds: tuple[float, ...] = ()  # per sample and epoch, of each repeat
    cpu_seconds: tuple[float, ...] = ()  # the same on all threads; a busy machine changes them less


def tried(trial: Trial) -> Measured:
    """The figures of a trial; raises `MachineError`, or `MemoryError` if it went over its limit."""
    found = apart.ask("edge_client.trial", trial, threads=trial.run.train.threads, what="the trial")
    return from_map(Measured, found, where="result of the trial")


def measure(trial: Trial) -> Measured:
    """The figures, in this process; malloc must be pinned before torch is loaded."""
    from edge_client.rehearsal import prepare

    made = prepare(trial.run, trial.input_shape, task=trial.task, cut=trial.plan.slice, dtype=trial.plan.dtype)
    made.model.recompute = trial.plan.recompute
    if not meter.reset_peak():
        raise MachineError("this system does not let a process reset its peak memory (/proc/self/clear_refs)")
    base_bytes = meter.rss_bytes()
    if trial.limit_bytes:
        guard.limit_growth(trial.limit_bytes)
    with tempfile.TemporaryDirectory(prefix="fedfit-trial-") as folder:
        _train(made, trial, Path(folder))
        peak_bytes = meter.peak_rss_bytes() - base_bytes
        spent = [_train(made, trial, Path(folder)) for _ in range(trial.repeats)]
    return Measured(
        base_bytes=base_bytes,
        peak_bytes=max(0, peak_bytes),
        seconds=tuple(wall for wall, _ in spent),
        cpu_seconds=tuple(cpu for _, cpu in spent),
    )


def _train(made: Rehearsal, trial: Trial, folder: Path) -> tuple[float, float]:
    """Train once; seconds per sample and epoch, by the clock and of the processor."""
    from edge_client.training.loop import train

    batch = trial.run.train.batch
    num_samples = trial.steps * batch
    wall, cpu = time.perf_counter(), time.process_time()
    client = made.client(trial.plan, epochs=trial.epochs)
    train(made.model, client, made.samples(num_samples), made.settings(batch, trial.plan, folder))
    client.end()
    shared = num_samples * trial.epochs
    return (time.perf_counter() - wall) / shared, (time.process_time() - cpu) / shared


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    return apart.answer(Trial, measure, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
