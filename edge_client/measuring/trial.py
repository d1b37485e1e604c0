"""Trains a few steps by a plan and measures them, in a process of its own, as a worker is.

Malloc is pinned, the model is built, laid out and warmed up; then it is evaluated and trained for two epochs on random
samples, by the real loop and the method's client half. The last batch of an epoch is a smaller one, as in real life:
libraries keep code and tables for every number of samples that they have met.

    base    private memory of the warm process
    peak    the most that it took while it trained, without the base

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

from edge_client.config.run_file import RunFile
from edge_client.device import guard
from edge_client.device.step_peak import StepPeak
from edge_client.measuring import subprocess_call
from edge_client.records import Count, Positive, TrainingPlan, from_map

if TYPE_CHECKING:
    from edge_client.measuring.prepared_training import PreparedTraining

__all__ = ["Trial", "TrialResult", "main", "measure", "run_trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What to train, and how."""

    run: RunFile
    input_shape: tuple[int, ...]
    plan: TrainingPlan
    task: str | None = None  # the task's file and object, FILE:OBJECT
    evaluated: Count = 0  # samples at a time in the evaluation before the training; 0: none
    whole_batches: Positive = 1  # in an epoch; a smaller one comes on top
    epochs: Positive = 2
    repeats: Count = 0  # times that whole batches are trained again for the clock
    limit_bytes: Count = 0  # that the process may grow by; 0: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Memory and time of a trial."""

    base_bytes: Count
    peak_bytes: Count  # on top of the base
    seconds: tuple[float, ...] = ()  # per sample and epoch, of each repeat
    cpu_seconds: tuple[float, ...] = ()  # the same on all threads; a busy machine changes them less


def run_trial(trial: Trial) -> TrialResult:
    """Run a trial in a new process; raises `MachineError`, or `MemoryError` if it went over its limit."""
    result = subprocess_call.call(
        "edge_client.measuring.trial", trial, threads=trial.run.train.threads, what="the trial"
    )
    return from_map(TrialResult, result, where="result of the trial")


def measure(trial: Trial) -> TrialResult:
    """Run a trial in this process; malloc must be pinned before torch is loaded."""
    from edge_client.measuring.prepared_training import prepare

    prepared = prepare(
        trial.run, trial.input_shape, task=trial.task, slice_name=trial.plan.slice, dtype=trial.plan.dtype
    )
    prepared.model.recompute = trial.plan.recompute
    peak = StepPeak()
    if trial.limit_bytes:
        guard.limit_growth(trial.limit_bytes)
    batch = trial.run.train.batch
    rest = batch // 2 + trial.plan.microbatch // 4
    with tempfile.TemporaryDirectory(prefix="fedfit-trial-") as folder:
        with prepared.recipe.user_code("training it"):
            if trial.evaluated:
                _evaluate(prepared, trial.evaluated, peak)
            _train(prepared, trial, trial.whole_batches * batch + rest, Path(folder), peak)
        peak.look()
        spans = [_train(prepared, trial, trial.whole_batches * batch, Path(folder)) for _ in range(trial.repeats)]
    return TrialResult(
        base_bytes=peak.base_bytes,
        peak_bytes=peak.num_bytes,
        seconds=tuple(wall for wall, _ in spans),
        cpu_seconds=tuple(cpu for _, cpu in spans),
    )


def _evaluate(prepared: PreparedTraining, microbatch: int, peak: StepPeak) -> None:
    from edge_client.training.evaluate import evaluate

    evaluate(
        prepared.model,
        prepared.model,
        prepared.samples(microbatch + microbatch // 2),
        num_classes=prepared.num_classes,
        microbatch=microbatch,
        channels_last=prepared.channels_last,
        dtype=prepared.dtype,
        progress=peak.look,
    )


def _train(
    prepared: PreparedTraining, trial: Trial, num_samples: int, folder: Path, peak: StepPeak | None = None
) -> tuple[float, float]:
    """Train once; seconds per sample and epoch, by the clock and of the processor."""
    from edge_client.training.loop import train

    wall, cpu = time.perf_counter(), time.process_time()
    client = prepared.client(trial.plan, epochs=trial.epochs)
    settings = prepared.settings(trial.run.train.batch, trial.plan, folder)
    progress = peak.look if peak is not None else None
    train(prepared.model, client, prepared.samples(num_samples), settings, progress=progress)
    client.end()
    samples_trained = num_samples * trial.epochs
    return (time.perf_counter() - wall) / samples_trained, (time.process_time() - cpu) / samples_trained


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    return subprocess_call.serve(Trial, measure, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
