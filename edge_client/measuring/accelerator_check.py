"""Asks in a process of its own what the owner's accelerator is, and trains a few real steps there.

The daemon has no torch, and a driver that is broken may end the process that loads it. What the steps were predicted to
reserve, from allocations that were recorded on the CPU, is compared with what they reserved.
Covers: the facts, the comparison. Does not cover: what a worker may use of it (`worker.accelerator_memory`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.measuring import subprocess_call
from edge_client.records import Count, Fingerprint, MemoryKind, Text, TrainingPlan, from_map

if TYPE_CHECKING:
    from edge_client.device.accelerator import Accelerator

__all__ = ["AcceleratorFacts", "CheckJob", "check", "main", "measure"]

_RUN = {
    "name": "check",
    "model": {"name": "resnet10", "input": [3, 32, 32], "base-width": 16, "small-stem": True},
    "classes": [str(number) for number in range(10)],
    "train": {"batch": 32, "momentum": 0.9},
}
_MICROBATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckJob:
    """What the owner wants to train on."""

    accelerator: Text
    trains: bool = False  # a few steps of a small model, too


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorFacts:
    """The accelerator that was chosen; without one, why."""

    name: Text = ""  # such as cuda:0; empty: the CPU
    reason: Text = ""  # why it is the CPU
    fingerprint: Fingerprint = ""
    memory: MemoryKind = ""
    total_bytes: Count = 0
    free_bytes: Count = 0  # as if this process had no context
    context_bytes: Count = 0
    dtypes: tuple[Text, ...] = ()
    users: tuple[Text, ...] = ()  # other processes that hold its memory
    predicted_bytes: Count = 0  # of the steps: what torch would reserve
    reserved_bytes: Count = 0  # what it reserved


def check(wish: str, *, trains: bool = False) -> AcceleratorFacts:
    """Ask in a new process; raises `InputError` for a named accelerator that cannot be used, `MachineError`."""
    result = subprocess_call.call(
        "edge_client.measuring.accelerator_check",
        CheckJob(accelerator=wish, trains=trains),
        threads=1,
        what="the check of the accelerator",
    )
    return from_map(AcceleratorFacts, result, where="result of the check")


def measure(job: CheckJob) -> AcceleratorFacts:
    """Ask in this process."""
    import os

    from edge_client.device.accelerator import CPU, choose

    choice = choose(job.accelerator)
    device = choice.accelerator
    if device is CPU:
        return AcceleratorFacts(reason=choice.reason)
    device.take()
    facts = AcceleratorFacts()
    if job.trains:
        facts = _train(device)
    context = device.context_bytes()
    free, total = device.memory_bytes()
    return replace(
        facts,
        name=f"{device.kind}:{device.device.index or 0}",
        fingerprint=device.fingerprint()[:200],
        memory=device.memory,
        total_bytes=total,
        free_bytes=min(total, free + context + device.reserved_bytes()),
        context_bytes=context,
        dtypes=device.dtypes(),
        users=tuple(str(user)[:200] for user in device.users() if user.pid != os.getpid()),
    )


def _train(device: Accelerator) -> AcceleratorFacts:
    """Three steps in two pieces each; the model's memory is given back."""
    from edge_client.measuring import allocation_recording
    from edge_client.measuring.prepared_training import prepare
    from edge_client.planning.allocation_sequence import Sizes, reserved
    from edge_client.training.loop import train

    run = parse_table(RunFile, _RUN, source="check")
    assert run.model is not None
    plan = TrainingPlan(microbatch=_MICROBATCH, budget_bytes=0, predicted_bytes=0)
    prepared = prepare(run, run.model.input)
    job = allocation_recording.job_for(run, "check", run.model.input, plan)
    sizes = Sizes.of(batch=run.train.batch, microbatch=_MICROBATCH, num_samples=0)
    predicted = reserved(allocation_recording.record(prepared, job), sizes).peak_reserved_bytes
    there = replace(prepared, model=device.move(prepared.model))
    device.reset_peak()
    client = there.client(plan, epochs=3)
    train(there.model, client, there.samples(run.train.batch), there.settings(run.train.batch, plan))
    device.synchronise()
    return AcceleratorFacts(predicted_bytes=predicted, reserved_bytes=device.peak_reserved_bytes())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    return subprocess_call.serve(CheckJob, measure, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
