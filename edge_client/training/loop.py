"""The only batch loop: it asks a method's client half what to minimise, and trains.

    for each phase, for each batch, for each microbatch: terms -> backward, one by one; observe
    then once per batch, per parameter: adjust -> optimizer step; after_step

A mean divides by the whole batch, so that microbatches change nothing but rounding (except for BatchNorm in
training mode: its statistics are those of a microbatch). The order of samples follows from the seed alone.
When less memory is left (`replan`), microbatches are smaller from the next batch on, and after the phase the method is
asked again which phases remain.
Does not cover: what is minimised (`methods`), how large a microbatch may be (`planning`), what the frozen units of a
phase make of the samples (`inputs`), evaluation (`evaluate`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from edge_client.device.accelerator import device_of
from edge_client.models.contract import Model
from edge_client.records import TrainingPlan
from edge_client.training import optimizers
from edge_client.training.contract import Batch, Client, Data, Phase, Term
from edge_client.training.inputs import StoredOutputs, Take, brought, inputs
from edge_client.training.loss_scale import LossScale
from edge_client.training.modes import set_for_phase
from edge_client.training.optimizers import Optimizer
from edge_client.training.seeds import derive

__all__ = ["Data", "Settings", "Trained", "generator", "pieces_of", "train"]

Progress = Callable[[int, int, float], None]  # step (from 1), total, the step's loss
Replan = Callable[[], TrainingPlan | None]  # a plan that fits the memory that there is now; none: go on as before


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to train; from the run, the assignment and the plan."""

    batch: int
    microbatch: int
    learning_rate: float
    seed: int
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_steps: int | None = None  # of all phases together; they share it, and each has one at least
    buffered: bool = False  # outputs of frozen units are kept in `folder` for the length of a phase
    folder: Path | None = None  # for files that may vanish
    channels_last: bool = False  # layout of images; the model's weights have been laid out like that
    dtype: str = "fp32"  # of activations
    warm_up: bool = False  # step s of S has the rate learning_rate * s / S

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of a step, counted from 1."""
        return self.learning_rate * step / num_steps if self.warm_up else self.learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How much was trained, and with which loss."""

    steps: int
    mean_loss: float  # over all steps; 0.0 if there were none


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A random generator for one purpose: the same seed and purpose give the same numbers."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def pieces_of(indices: Tensor, size: int) -> list[Tensor]:
    """Consecutive pieces of at most `size`."""
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def train(
    model: Model,
    client: Client,
    data: Data,
    settings: Settings,
    *,
    progress: Progress | None = None,
    replan: Replan | None = None,
    in_force: Callable[[TrainingPlan], None] | None = None,
) -> Trained:
    """Run all phases of `client`, which has begun, on `data`; changes `model` in place.

    `replan` is called before every batch; `in_force` is called when the method goes by the new plan.
    """
    with StoredOutputs() as stored:
        training = _Training(model, client, data, settings, stored, progress, replan, in_force)
        while training.schedule:
            training.run_phase()
    return Trained(steps=training.steps, mean_loss=training.losses / training.steps if training.steps else 0.0)


class _Training:
    """The state of a training, from batch to batch: its schedule, its plan, its losses."""

    def __init__(
        self,
        model: Model,
        client: Client,
        data: Data,
        settings: Settings,
        stored: StoredOutputs,
        progress: Progress | None,
        replan: Replan | None,
        in_force: Callable[[TrainingPlan], None] | None,
    ) -> None:
        if settings.buffered and settings.folder is None:
            raise ValueError("buffered outputs need a folder, got none")
        self.model, self.client, self.settings = model, client, settings
        self._device = device_of(model)
        self.data = brought(data, self._device, channels_last=settings.channels_last)
        self.steps, self.losses = 0, 0.0
        self.schedule: list[tuple[Phase, int]] = []
        self._total = 0
        self._progress = progress
        self._replan = replan
        self._in_force = in_force
        self._plan: TrainingPlan | None = None  # that the client half does not know yet
        self._stored = stored
        self._shared: dict[str, Optimizer] = {}
        self._scale = LossScale() if settings.dtype == "fp16" else None
        self._finished: set[str] = set()  # names of phases
        self._set_schedule()

    def _set_schedule(self) -> None:
        phases = [phase for phase in self.client.phases() if phase.name not in self._finished]
        max_steps = self.settings.max_steps
        num_batches = [math.ceil(len(self._data(phase)) / self.settings.batch) for phase in phases]
        steps = _allot(phases, num_batches, None if max_steps is None else max_steps - self.steps)
        self.schedule = list(zip(phases, steps, strict=True))
        self._total = self.steps + sum(steps)

    def _data(self, phase: Phase) -> Data:
        """The device's own samples, or those that the phase brings."""
        if phase.data is None:
            return self.data
        return brought(phase.data, self._device, channels_last=self.settings.channels_last)

    def run_phase(self) -> None:
        """Train the first phase of the schedule."""
        phase, num_steps = self.schedule.pop(0)
        modules = self.client.modules()
        data = self._data(phase)
        optimizer = _optimizer(phase, self.settings, self._shared)
        with set_for_phase(self.model, modules, phase) as params, self._inputs(modules, phase, data, num_steps) as take:
            for batch, last_epoch in _batches(len(data), num_steps, phase, self.settings):
                self._adopt_smaller_plan()
                chosen = _trainable(batch, self.settings.microbatch, self.model.min_batch)
                if len(chosen) == 0:
                    continue
                labels = self._device.move(data.labels[chosen])
                step = _Step(self.model, self.client, phase, params, take, labels, last_epoch, self._scale)
                rate = self.settings.rate(self.steps + 1, self._total)
                self._record(step.run(chosen, optimizer, rate, self.settings.microbatch, self.settings.dtype))
        self._finished.add(phase.name)
        if self.schedule:
            self._device.free()  # segments of this phase fit the next one badly
        if self._plan is not None and self.schedule:
            self.client.replan(self._plan)
            if self._in_force is not None:
                self._in_force(self._plan)
            self._plan = None
            self._set_schedule()

    @contextmanager
    def _inputs(self, modules: Mapping[str, nn.Module], phase: Phase, data: Data, num_steps: int) -> Iterator[Take]:
        settings = self.settings
        models = {"": self.model} | {key: _as_model(key, modules[key], phase) for key in phase.beside}
        with inputs(
            models,
            phase,
            data,
            microbatch=settings.microbatch,
            folder=settings.folder if settings.buffered and num_steps else None,
            order=generator(settings.seed, "buffer"),
            dtype=settings.dtype,
            stored=self._stored,
        ) as take:
            yield take

    def _adopt_smaller_plan(self) -> None:
        """Take what a new plan changes at once, if there is less memory now."""
        plan = self._replan() if self._replan is not None else None
        if plan is not None:
            self._plan = plan
            self.settings = dataclasses.replace(
                self.settings,
                microbatch=plan.microbatch,
                buffered=plan.buffered and self.settings.folder is not None,
            )
            for module in (self.model, *self.client.modules().values()):
                if isinstance(module, Model):
                    module.recompute = plan.recompute  # changes no result: it need not wait for the phase's end

    def _record(self, loss: float) -> None:
        self.steps += 1
        self.losses += loss
        if self._progress is not None:
            self._progress(self.steps, self._total, loss)


def _allot(phases: Sequence[Phase], num_batches: Sequence[int], max_steps: int | None) -> list[int]:
    """Steps of each phase; `max_steps` is shared among them in proportion, and each phase gets at least one."""
    # 7/3 epochs of 3 batches are 7
    planned = [math.ceil(phase.epochs * count - 1e-9) for phase, count in zip(phases, num_batches, strict=True)]
    if max_steps is None or sum(planned) <= max_steps:
        return planned
    ends = [max(0, max_steps) * end // sum(planned) for end in itertools.accumulate(planned)]
    shares = [end - start for start, end in itertools.pairwise([0, *ends])]
    return [min(steps, max(1, share)) for steps, share in zip(planned, shares, strict=True)]


def _as_model(key: str, module: nn.Module, phase: Phase) -> Model:
    if not isinstance(module, Model):
        raise ValueError(f"phase {phase.name!r}: expected a model beside the run's at {key!r}, got {type(module)}")
    return module


def _optimizer(phase: Phase, settings: Settings, shared: dict[str, Optimizer]) -> Optimizer:
    optimizer = optimizers.make(settings.optimizer, momentum=settings.momentum, weight_decay=settings.weight_decay)
    if phase.optimizer_state is not None:
        optimizer.state = phase.optimizer_state
    return optimizer if phase.optimizer == "fresh" else shared.setdefault(phase.optimizer, optimizer)


def _batches(num_samples: int, num_steps: int, phase: Phase, settings: Settings) -> Iterator[tuple[Tensor, bool]]:
    """Sample positions of each step, and whether it is of the last epoch: a new permutation per epoch."""
    epoch = 0
    while num_steps > 0:
        order = torch.randperm(num_samples, generator=generator(settings.seed, "shuffle", phase.name, epoch))
        pieces = pieces_of(order, settings.batch)[:num_steps]
        num_steps -= len(pieces)
        yield from ((piece, num_steps == 0) for piece in pieces)
        epoch += 1


def _trainable(chosen: Tensor, microbatch: int, min_batch: int) -> Tensor:
    """A batch without a last piece that is too small for the model: BatchNorm has no statistics of one value."""
    too_small = len(chosen) % microbatch < min_batch
    return chosen[: len(chosen) - len(chosen) % microbatch] if too_small else chosen


@dataclass(frozen=True, slots=True)
class _Step:
    """One optimizer step over one batch."""

    model: Model
    client: Client
    phase: Phase
    params: Mapping[str, nn.Parameter]
    take: Take
    labels: Tensor  # of the whole batch
    last_epoch: bool
    scale: LossScale | None = None  # where gradients pass through fp16

    def run(self, chosen: Tensor, optimizer: Optimizer, rate: float, microbatch: int, dtype: str) -> float:
        """Gradients of all pieces, then the step; returns the loss."""
        separate: dict[str, dict[str, Tensor]] = {name: {} for name in self.phase.keep}
        loss = 0.0
        for number, piece in enumerate(pieces_of(chosen, microbatch)):
            loss += self._piece(piece, microbatch, dtype, separate, first=number == 0)
        if self.scale is not None and not self.scale.take_back(self._gradients(separate)):
            for param in self.params.values():
                param.grad = None
            return loss
        for name, param in self.params.items():
            grad = param.grad if param.grad is not None else torch.zeros_like(param)
            with torch.no_grad():
                of_terms = {term: grads[name] for term, grads in separate.items() if name in grads}
                self.client.adjust(name, param, grad, of_terms)
            optimizer.step(name, param, grad, rate)
            param.grad = None  # freed one by one: the next batch's activations take its place
        with torch.no_grad():
            self.client.after_step(self.params, rate)
        return loss

    def _gradients(self, separate: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Tensor]:
        yield from (param.grad for param in self.params.values() if param.grad is not None)
        yield from (grad for grads in separate.values() for grad in grads.values())

    def _piece(
        self, piece: Tensor, microbatch: int, dtype: str, separate: dict[str, dict[str, Tensor]], *, first: bool
    ) -> float:
        """Back-propagate all terms of one piece; returns its share of the loss."""
        beside, y = self.take(piece, microbatch)
        x = beside.pop("")
        batch = Batch(
            x=x,
            y=y,
            num_whole=len(self.labels),
            whole_y=self.labels,
            first=first,
            most=microbatch,
            positions=piece,
            last_epoch=self.last_epoch,
            beside=beside,
        )
        loss = 0.0
        with _tapped(self.model, self.phase) as taps:
            for term in self._terms(batch, dtype):
                factor = self.scale.factor if self.scale is not None else 1.0
                share = _backward(term, batch, self.params, separate.get(term.name), factor)
                loss += share if term.reported else 0.0
            if self.phase.taps:
                self.client.observe(batch, taps, self.phase)
        return loss

    def _terms(self, batch: Batch, dtype: str) -> Iterator[Term]:
        """The terms of the loss, computed in this type; what the caller does with a term is not."""
        terms = iter(self.client.terms(batch, self.phase))
        while True:
            with device_of(self.model).autocast(dtype):
                term = next(terms, None)
            if term is None:
                return
            yield term


def _backward(
    term: Term,
    batch: Batch,
    params: Mapping[str, nn.Parameter],
    separate: dict[str, Tensor] | None,
    factor: float = 1.0,
) -> float:
    """Add the term's gradient, times `factor`, to `param.grad` or `separate`; returns its share of the step's loss."""
    value = _value(term, batch)
    if value is None:
        return 0.0
    if value.requires_grad:
        with _adding_to(separate, params) if separate is not None else nullcontext():
            (value if factor == 1 else value * factor).backward()  # type: ignore[no-untyped-call]
    return value.item()


@contextmanager
def _adding_to(separate: dict[str, Tensor], params: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Gradients of the body go to `separate`, added one by one: a new set beside both others would be a third."""
    before = {name: param.grad for name, param in params.items()}
    for name, param in params.items():
        param.grad = separate.get(name)
    yield
    for name, param in params.items():
        separate |= {name: param.grad} if param.grad is not None else {}
        param.grad = before[name]


def _value(term: Term, batch: Batch) -> Tensor | None:
    """The scalar to back-propagate for this piece of the batch."""
    if (term.each is None) == (term.once is None):
        raise ValueError(f"term {term.name!r}: expected either each or once, got both or none")
    if term.once is not None:
        return term.weight * term.once if batch.first else None
    assert term.each is not None
    if term.each.shape != batch.y.shape:
        raise ValueError(f"term {term.name!r}: expected {len(batch.y)} losses, got shape {tuple(term.each.shape)}")
    if term.mask is None:
        denominator = batch.num_whole if term.denominator is None else term.denominator
        return term.weight * term.each.sum() / denominator
    if term.denominator is None:
        raise ValueError(f"term {term.name!r} has a mask but no denominator: its sum over the whole batch")
    if term.denominator == 0:  # no sample of the whole batch takes part
        return None
    return term.weight * (term.each * term.mask).sum() / term.denominator


@contextmanager
def _tapped(model: Model, phase: Phase) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs at the phase's taps, detached, from the first forward pass of a piece."""
    outputs: dict[str, Tensor] = {}
    unknown = phase.taps - model.taps.keys()
    if unknown:
        raise ValueError(f"phase {phase.name!r} observes {sorted(unknown)[0]!r}; the model has {', '.join(model.taps)}")

    def keep(taps: Sequence[str], output: Tensor) -> None:
        for tap in taps:
            outputs.setdefault(tap, output.detach())

    taps_at: dict[str, list[str]] = {}
    for tap in sorted(phase.taps):
        taps_at.setdefault(model.taps[tap], []).append(tap)
    watchers = {place: partial(keep, taps) for place, taps in taps_at.items()}
    handles = [
        model.get_submodule(place).register_forward_hook(partial(_output_to, watch))
        for place, watch in watchers.items()
        if place not in model.order
    ]
    try:
        with model.watching({place: watch for place, watch in watchers.items() if place in model.order}):
            yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _output_to(watch: Callable[[Tensor], None], module: nn.Module, inputs: object, output: Tensor) -> None:
    watch(output)
