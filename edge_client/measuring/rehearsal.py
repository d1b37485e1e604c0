"""Tries a plan before anything depends on it: a few steps of what it will do, measured inside its limit.

    one forward pass for each number of samples that the evaluation meets
    a whole batch, the last batch of an epoch, a whole batch again

with the real loop, the method's own client half and a learning rate of 0. Momentum exists only from the second step,
and what libraries keep for the last batch only after an epoch: a single step of each kind misses most peaks.
What has run stays in memory, so a rehearsal has a process of its own, or a fork of a warm one, which ends with it.
Covers: the steps, their peak and their time. Does not cover: what follows from them (`rehearsed`).
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.config.quantities import format_bytes
from edge_client.config.run_file import RunFile
from edge_client.device import guard, meter
from edge_client.device.step_peak import StepPeak
from edge_client.errors import is_out_of_accelerator_memory, is_out_of_memory
from edge_client.measuring import subprocess_call
from edge_client.measuring.rehearsed import Rehearsed, Shapes
from edge_client.records import Count, Hash, TrainingPlan, from_map

if TYPE_CHECKING:
    from torch import Tensor

    from edge_client.device.accelerator import Accelerator
    from edge_client.models.contract import Model
    from edge_client.training.contract import Batch, Client, Data, Phase, Term
    from edge_client.training.loop import Settings

__all__ = ["Rehearsal", "RehearsalJob", "main", "measure", "rehearse", "run_rehearsal"]

_STEPS = 3  # of each phase
_RESERVE_BYTES = 64 * 2**20  # virtual memory that is reserved and hardly used, at least
_PER_CONVOLUTION_BYTES = 3 * 2**20  # of these, for generated code


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalJob:
    """A plan to try with random samples in a process of its own."""

    key: Hash
    run: RunFile
    input_shape: tuple[int, ...]
    plan: TrainingPlan
    shapes: Shapes
    task: str | None = None  # the task's file and object, FILE:OBJECT
    limit_bytes: Count = 0  # that it may grow by; 0: no limit


def run_rehearsal(job: RehearsalJob) -> Rehearsed:
    """Rehearse in a new process; raises `MachineError`, or `InputError` for a task's model that does not train."""
    result = subprocess_call.call(
        "edge_client.measuring.rehearsal", job, threads=job.run.train.threads, what="the rehearsal"
    )
    return from_map(Rehearsed, result, where="result of the rehearsal")


def measure(job: RehearsalJob) -> Rehearsed:
    """Rehearse in this process; malloc must be pinned before torch is loaded."""
    from edge_client.measuring.prepared_training import prepare

    prepared = prepare(job.run, job.input_shape, task=job.task, slice_name=job.plan.slice, dtype=job.plan.dtype)
    prepared.model.recompute = job.plan.recompute
    with tempfile.TemporaryDirectory(prefix="fedfit-rehearsal-") as folder:
        rehearsal = Rehearsal(
            model=prepared.model,
            begin=lambda: prepared.client(job.plan, epochs=_STEPS),
            data=prepared.samples(job.shapes.num_samples),
            test=prepared.samples(max(job.shapes.evaluated, default=0)),
            settings=prepared.settings(job.run.train.batch, job.plan, Path(folder)),
            num_classes=prepared.num_classes,
        )
        with prepared.recipe.user_code("rehearsing it"):
            return rehearse(rehearsal, job.shapes, key=job.key, limit_bytes=job.limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """All that a rehearsal needs, in a process that is warm; it may be anybody's data."""

    model: Model
    begin: Callable[[], Client]  # the method's client half, begun
    data: Data
    test: Data
    settings: Settings
    num_classes: int
    progress: Callable[[], None] = lambda: None  # called after every step: somebody may wait for signs of life


def rehearse(
    rehearsal: Rehearsal, shapes: Shapes, *, key: str, limit_bytes: int = 0, accelerator: Accelerator | None = None
) -> Rehearsed:
    """Go through the steps in this process, and tell what they took; where that is over the limit, `over` is set.

    On an accelerator its own limit counts, which is set already.
    """
    if accelerator is not None:
        accelerator.reset_peak()
    watch = _Watch(limit_bytes=limit_bytes, rehearsal=rehearsal)
    steps, is_over = _StepTimes(), False
    try:
        client = rehearsal.begin()
        _evaluate(rehearsal, client, shapes, watch)
        if accelerator is not None:
            accelerator.free()
        _train(rehearsal, client, shapes, watch, steps)
    except (MemoryError, RuntimeError) as error:
        is_refused = accelerator is not None and is_out_of_accelerator_memory(error)
        if not is_refused and (not limit_bytes or not is_out_of_memory(error)):
            raise
        guard.lift_limit()
        is_over = True
    return Rehearsed(
        key=key,
        peak_bytes=max(watch.peak_bytes(), limit_bytes if is_over else 0),
        reserved_bytes=watch.reserved_bytes(),
        over=is_over,
        accelerator_bytes=accelerator.peak_reserved_bytes() if accelerator is not None else 0,
        num_convolutions=watch.num_convolutions,
        sample_s=steps.sample_s(),
        step_s=steps.step_s(),
    )


class _Watch:
    """What the process has grown by since this began."""

    def __init__(self, *, limit_bytes: int, rehearsal: Rehearsal) -> None:
        self.num_convolutions = num_convolutions = _num_convolutions(rehearsal.model)
        self._progress = rehearsal.progress
        self._limit_bytes = limit_bytes
        self._peak, self._virtual_bytes = StepPeak(), meter.virtual_bytes()
        if limit_bytes:
            guard.limit_growth(limit_bytes + max(_RESERVE_BYTES, num_convolutions * _PER_CONVOLUTION_BYTES))

    def peak_bytes(self) -> int:
        """Of private memory, at most."""
        self._peak.look()
        return self._peak.num_bytes

    def reserved_bytes(self) -> int:
        """Of virtual memory, at most."""
        return max(0, meter.peak_virtual_bytes() - self._virtual_bytes)

    def check(self) -> None:
        """After each step: raise `MemoryError` over the limit."""
        self._progress()
        peak_bytes = self.peak_bytes()
        if self._limit_bytes and peak_bytes > self._limit_bytes:
            raise MemoryError(f"it took {format_bytes(peak_bytes)} of {format_bytes(self._limit_bytes)}")


def _num_convolutions(model: Model) -> int:
    from torch import nn

    return sum(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())


def _evaluate(rehearsal: Rehearsal, client: Client, shapes: Shapes, watch: _Watch) -> None:
    from edge_client.training.evaluate import evaluate

    for size in shapes.evaluated:
        evaluate(
            rehearsal.model,
            client.predict,
            _Part(rehearsal.test, size),
            num_classes=rehearsal.num_classes,
            microbatch=size,
            channels_last=rehearsal.settings.channels_last,
            dtype=rehearsal.settings.dtype,
        )
        watch.check()


def _train(rehearsal: Rehearsal, client: Client, shapes: Shapes, watch: _Watch, steps: _StepTimes) -> None:
    from edge_client.training.loop import train

    phases, terms, adjust = client.phases, client.terms, client.adjust
    epochs = 2 if shapes.last else _STEPS

    def shortened_phases() -> list[Phase]:
        return [
            dataclasses.replace(
                phase,
                epochs=epochs,
                data=_Part(phase.data, shapes.num_samples) if phase.data is not None else None,
            )
            for phase in phases()
        ]

    def noted_terms(batch: Batch, phase: Phase) -> Iterator[Term]:
        steps.in_phase(phase.name, batch.num_whole)
        return terms(batch, phase)

    def noted_adjust(*arguments: object) -> None:
        steps.adjusting()
        adjust(*arguments)  # type: ignore[arg-type]

    # the client half is this rehearsal's own: its phases are shortened, and its calls noted, in place
    for name, function in (("phases", shortened_phases), ("terms", noted_terms), ("adjust", noted_adjust)):
        setattr(client, name, function)

    def after_step(step: int, total: int, loss: float) -> None:
        steps.end()
        watch.check()

    settings = dataclasses.replace(
        rehearsal.settings,
        batch=shapes.batch,
        learning_rate=0.0,
        max_steps=_STEPS * len(client.phases()),
        warm_up=False,
    )
    steps.begin()
    train(rehearsal.model, client, _Part(rehearsal.data, shapes.num_samples), settings, progress=after_step)
    client.end()
    watch.check()


class _Part:
    """The first samples of others."""

    def __init__(self, data: Data, num_samples: int) -> None:
        self._data = data
        self.labels = data.labels[:num_samples]

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._data.batch(indices)


@dataclass(slots=True)
class _StepTimes:
    """The time of each phase's last whole batch: its pieces, and what comes after them."""

    _phase: str = ""
    _samples: int = 0
    _since: float = 0.0
    _adjusted: float = 0.0
    _of_phase: dict[str, tuple[int, float, float]] = field(default_factory=dict)  # samples, pieces, the rest

    def begin(self) -> None:
        self._since, self._adjusted = time.perf_counter(), 0.0

    def in_phase(self, name: str, num_samples: int) -> None:
        """A piece of a batch of so many samples begins."""
        self._phase, self._samples = name, num_samples

    def adjusting(self) -> None:
        """The gradients are there, and the first parameter is next."""
        self._adjusted = self._adjusted or time.perf_counter()

    def end(self) -> None:
        """A step is done."""
        now = time.perf_counter()
        before = self._of_phase.get(self._phase)
        if before is None or self._samples >= before[0]:
            adjusted = self._adjusted or now
            self._of_phase[self._phase] = (self._samples, adjusted - self._since, now - adjusted)
        self.begin()

    def sample_s(self) -> float:
        """Per sample, in all phases together."""
        return sum(pieces / max(1, samples) for samples, pieces, _ in self._of_phase.values())

    def step_s(self) -> float:
        """Per batch beside its pieces."""
        return sum(rest for _, _, rest in self._of_phase.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    return subprocess_call.serve(RehearsalJob, measure, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
