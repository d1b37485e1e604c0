"""Single steps of a model that is measured, through the real loop and the method's client half.

Covers: training and evaluating on random samples, with marks for a trace or by themselves. Does not cover: what is read
from them (`unit_costs`, `hidden_memory`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from edge_client.device import meter
from edge_client.device.accelerator import device_of
from edge_client.measuring.allocation_trace import BATCH, Trace, TracePair, mark, marks_gradient, profiled
from edge_client.measuring.prepared_training import PreparedTraining, RandomSamples
from edge_client.models.contract import Model
from edge_client.records import TrainingPlan
from edge_client.training.contract import Batch, Phase, Term
from edge_client.training.evaluate import evaluate
from edge_client.training.inputs import brought
from edge_client.training.loop import train

__all__ = ["Groups", "StepRunner", "TracedStep", "activation_bytes", "batches_for"]

_BATCHES = ((8, 16), (4, 8), (2, 4))  # the first whose activations are small
_ACTIVATION_BYTES = 256 * 2**20
_COPIES = 3  # of all activations, roughly, during a step

Groups = tuple[tuple[str, ...], ...]


def batches_for(model: Model) -> tuple[int, int]:
    """The two batches to measure with."""
    fitting = (pair for pair in _BATCHES if pair[1] * activation_bytes(model) <= _ACTIVATION_BYTES)
    return next(fitting, _BATCHES[-1])


def activation_bytes(model: Model) -> int:
    """Roughly what a step takes per sample."""
    return 4 * _COPIES * sum(unit.num_activations for unit in model.units)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Two pieces of a batch."""

    fresh: TracePair
    adding: TracePair  # above gradients of earlier pieces, which are not in its lines


@dataclass(slots=True, kw_only=True)
class StepRunner:
    """Runs one model, and knows the two batches that it is measured with."""

    prepared: PreparedTraining
    batches: tuple[int, int]
    out_bytes: dict[str, int] = field(default_factory=dict)  # of one sample, by unit; known once a step was traced

    @property
    def model(self) -> Model:
        """That is measured."""
        return self.prepared.model

    @property
    def copied_bytes(self) -> int:
        """Copies of all weights that the method keeps: planners know of them by its rules."""
        weights = sum(param.nbytes for param in self.model.parameters())
        return self.prepared.method.plans.weight_copies * weights

    def single_blocks(self) -> Groups:
        """Each block as a group; none if the method trains no groups."""
        if not self.prepared.method.plans.groups:
            return ()
        return tuple((unit.name,) for unit in self.model.units if unit.kind == "block")

    def evaluate(self, *sizes: int) -> None:
        """The model, with so many samples at a time."""
        for size in sizes:
            evaluate(
                self.model,
                self.model,
                self.prepared.samples(size),
                num_classes=self.prepared.num_classes,
                microbatch=size,
                channels_last=self.prepared.channels_last,
                dtype=self.prepared.dtype,
            )

    def train(self, batch: int, groups: Groups, pieces: int = 1) -> list[int]:
        """One step of each group, or of everything; the RSS after each, without what the method keeps."""
        rss_bytes = self._train_once(batch, groups, pieces)
        gc.collect()  # a client half may be in a circle, and all that it keeps with it
        return rss_bytes

    def _train_once(self, batch: int, groups: Groups, pieces: int) -> list[int]:
        plan = TrainingPlan(groups=groups, microbatch=batch, budget_bytes=0, predicted_bytes=0)
        settings = replace(
            self.prepared.settings(pieces * batch, plan), optimizer="sgd", momentum=0.0, weight_decay=0.0
        )
        client = self.prepared.client(plan)
        terms = client.terms

        def marked_terms(batch: Batch, phase: Phase) -> Iterator[Term]:
            yield from terms(batch, phase)
            mark("done")

        client.terms = marked_terms  # type: ignore[method-assign]
        after: list[int] = []
        samples = _MarkedSamples(self.prepared.samples(pieces * batch))
        copied = self.copied_bytes
        train(self.model, client, samples, settings, progress=lambda *_: after.append(meter.rss_bytes() - copied))
        return after

    def traced_steps(self, groups: Groups) -> list[TracedStep]:
        """Of each group, or of everything: a first piece of a batch, and one that adds to its gradients."""
        small, large = (self._trace_training(batch, groups) for batch in self.batches)
        pairs = [TracePair(self.batches, *pair) for pair in zip(small, large, strict=True)]
        return [TracedStep(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]

    def _trace_training(self, batch: int, groups: Groups) -> list[Trace]:
        self.train(batch, groups)  # libraries choose their kernels at the first step of a shape
        with profiled() as trace, self._marked_units():
            self.train(batch, groups, pieces=2)
        return trace.parts()

    def traced_evaluation(self) -> TracePair:
        """A forward pass without gradients."""
        return TracePair(self.batches, *(self._trace_forward(batch) for batch in self.batches))

    def _trace_forward(self, batch: int) -> Trace:
        device = device_of(self.model)
        own = _MarkedSamples(self.prepared.samples(batch))
        samples = brought(own, device, channels_last=self.prepared.channels_last)
        self.model.eval()
        autocast = device.autocast(self.prepared.dtype)
        with profiled() as trace, self._marked_units(), torch.no_grad(), autocast:
            x, _ = samples.batch(torch.arange(batch))
            self.model(x)
            mark("end")
        return trace.parts()[0]

    @contextmanager
    def _marked_units(self) -> Iterator[None]:
        """Marks before and after each unit's forward, and where its backward begins."""
        original = self.model.run_units

        def run_units(names: Sequence[str], x: Tensor) -> Tensor:
            for name in names:
                frozen = "" if torch.is_grad_enabled() else "frozen/"
                mark(f"{frozen}pre/{name}")
                x = original([name], x)
                self.out_bytes[name] = x.nbytes // max(1, len(x))
                mark(f"{frozen}post/{name}")
                if x.requires_grad:
                    x.register_hook(marks_gradient(f"grad/{name}"))  # type: ignore[no-untyped-call]
            return x

        self.model.run_units = run_units  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.model.run_units


class _MarkedSamples:
    """Samples with a mark where each batch begins."""

    def __init__(self, samples: RandomSamples) -> None:
        self._samples = samples
        self.labels = samples.labels

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        mark(BATCH)
        return self._samples.batch(indices)
