"""Warms a process up with a step on zeros, unit by unit, through the real loop: it loads libraries and starts threads.

A process keeps the memory that this takes; training memory is counted from there. One unit at a time, so that the
warm-up of a model that is trained by groups needs no more than its largest unit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from edge_client.models.contract import Model
from edge_client.records import TrainingPlan
from edge_client.training.contract import Batch, Job, Outcome, Phase, Term
from edge_client.training.loop import Settings, train
from edge_client.training.objectives import cross_entropy

__all__ = ["warm_up"]

_BATCH = 2


def warm_up(model: Model, settings: Settings) -> None:
    """Train on two samples with a learning rate of 0; buffers change, so weights are loaded after it."""
    small = dataclasses.replace(
        settings, batch=_BATCH, microbatch=_BATCH, learning_rate=0.0, max_steps=None, buffered=False
    )
    train(model, _UnitByUnit(model), _Zeros(model.input_shape), small)


class _Zeros:
    """Two samples of zeros."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = shape
        self.labels = torch.zeros(_BATCH, dtype=torch.int64)

    def __len__(self) -> int:
        return _BATCH

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(indices), *self._shape), self.labels[indices]


class _UnitByUnit:
    """A client half that trains each unit in a phase of its own."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def begin(self, job: Job) -> None:
        """There is no job."""

    def modules(self) -> Mapping[str, nn.Module]:
        """Nothing beside the model."""
        return {}

    def phases(self) -> Sequence[Phase]:
        """One per unit that has something to train."""
        before = ""
        phases = []
        for unit in self._model.units:
            names = (name for name in unit.parameters if self._model.get_parameter(name).requires_grad)
            if trainable := frozenset(names):
                phases.append(Phase(name=unit.name, trainable=trainable, after=before))
            before = unit.name
        return phases

    def replan(self, plan: TrainingPlan) -> None:
        """A warm-up has no plan."""

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """The sum of the unit's outputs; a real loss for the head."""
        out = self._model.run_units([phase.name], batch.x)
        is_head = phase.name == self._model.order[-1]
        yield Term(name="warm_up", each=cross_entropy(out, batch.y) if is_head else out.flatten(1).sum(1))

    def adjust(self, name: str, param: Tensor, grad: Tensor, kept: Mapping[str, Tensor]) -> None:
        """Nothing."""

    def after_step(self, params: Mapping[str, Tensor], learning_rate: float) -> None:
        """Nothing."""

    def observe(self, batch: Batch, taps: Mapping[str, Tensor], phase: Phase) -> None:
        """Nothing."""

    def end(self) -> Outcome:
        """Nothing."""
        return Outcome()

    def predict(self, x: Tensor) -> Tensor:
        """A warm-up is not evaluated."""
        raise AssertionError("a warm-up predicts nothing")
