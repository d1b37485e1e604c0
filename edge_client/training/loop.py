"""The only batch loop: it asks a method's client half what to minimise, and trains.

    for each phase, for each batch, for each microbatch: terms -> backward, one by one; observe
    then once per batch, per parameter: adjust -> optimizer step; after_step

A mean divides by the whole batch, so that microbatches change nothing but rounding (except for BatchNorm in
training mode: its statistics are those of a microbatch). The order of samples follows from the seed alone.
Does not cover: what is minimised (`methods`), how large a microbatch may be (`planning`), evaluation (`evaluate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from edge_client.models.contract import Model
from edge_client.records import TrainingPlan
from edge_client.training import optimizers
from edge_client.training.contract import Batch, Client, Phase, Term
from edge_client.training.optimizers import Optimizer
from edge_client.training.seeds import derive

__all__ = ["Data", "Settings", "Trained", "generator", "pieces_of", "train"]

Progress = Callable[[int, int, float], None]  # step (from 1), total, the step's loss
Replan = Callable[[], TrainingPlan | None]  # before every batch: another plan from here on, or none


class Data(Protocol):
    """Samples by position; `data.sources.Samples` is one."""

    labels: Tensor  # [n] int64

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]: ...


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
    max_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the loop did."""

    steps: int
    mean_loss: float  # over all steps; 0.0 if there were none


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator of its own for `purpose`."""
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
) -> Trained:
    """Run all phases of `client`, which has begun, on `data`; changes `model` in place."""
    phases = client.phases()
    planned = [math.ceil(phase.epochs * math.ceil(len(data) / settings.batch)) for phase in phases]
    total = min(sum(planned), settings.max_steps if settings.max_steps is not None else sum(planned))
    shared: dict[str, Optimizer] = {}
    steps, losses = 0, 0.0
    for phase, num_steps in zip(phases, planned, strict=True):
        optimizer = _optimizer(phase, settings, shared)
        with _prepared(model, phase) as params:
            for batch in _batches(len(data), min(num_steps, total - steps), phase, settings):
                smaller = replan() if replan is not None else None
                if smaller is not None:
                    settings = replace(settings, microbatch=smaller.microbatch)
                chosen = _trainable(batch, settings.microbatch, model.min_batch)
                if len(chosen) == 0:
                    continue
                loss = _step(model, client, data, chosen, phase, settings, params, optimizer)
                steps += 1
                losses += loss
                if progress is not None:
                    progress(steps, total, loss)
    return Trained(steps=steps, mean_loss=losses / steps if steps else 0.0)


def _optimizer(phase: Phase, settings: Settings, shared: dict[str, Optimizer]) -> Optimizer:
    made = optimizers.make(settings.optimizer, momentum=settings.momentum, weight_decay=settings.weight_decay)
    return made if phase.optimizer == "fresh" else shared.setdefault(phase.optimizer, made)


def _batches(num_samples: int, num_steps: int, phase: Phase, settings: Settings) -> Iterator[Tensor]:
    """Sample positions of each step: a new permutation per epoch."""
    epoch = 0
    while num_steps > 0:
        order = torch.randperm(num_samples, generator=generator(settings.seed, "shuffle", phase.name, epoch))
        pieces = pieces_of(order, settings.batch)[:num_steps]
        yield from pieces
        num_steps -= len(pieces)
        epoch += 1


def _trainable(chosen: Tensor, microbatch: int, least: int) -> Tensor:
    """A batch without a last piece that is too small for the model: BatchNorm has no statistics of one value."""
    too_small = len(chosen) % microbatch < least
    return chosen[: len(chosen) - len(chosen) % microbatch] if too_small else chosen


@contextmanager
def _prepared(model: Model, phase: Phase) -> Iterator[dict[str, nn.Parameter]]:
    """The phase's parameters, with the model's modes set for it and put back after it."""
    if phase.batchnorm not in ("train", "eval", "restore"):
        raise ValueError(f"phase {phase.name!r}: expected batchnorm of train, eval, restore, got {phase.batchnorm!r}")
    everything = dict(model.named_parameters())
    unknown = phase.trainable - everything.keys()
    if unknown:
        raise ValueError(f"phase {phase.name!r} trains {sorted(unknown)[0]!r}, which the model does not have")
    required = {name: param.requires_grad for name, param in everything.items()}
    buffers = {name: b.clone() for name, b in model.named_buffers()} if phase.batchnorm == "restore" else {}
    model.train()
    if phase.batchnorm == "eval":
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
    for name, param in everything.items():
        param.requires_grad_(name in phase.trainable)
    try:
        yield {name: param for name, param in everything.items() if name in phase.trainable}
    finally:
        for name, param in everything.items():
            param.requires_grad_(required[name])
            param.grad = None
        for name, kept in buffers.items():
            model.get_buffer(name).copy_(kept)


def _step(
    model: Model,
    client: Client,
    data: Data,
    chosen: Tensor,
    phase: Phase,
    settings: Settings,
    params: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
) -> float:
    """One optimizer step over one batch; returns its loss."""
    kept: dict[str, dict[str, Tensor]] = {name: {} for name in phase.keep}
    loss = 0.0
    for number, piece in enumerate(pieces_of(chosen, settings.microbatch)):
        x, y = data.batch(piece)
        batch = Batch(x=x, y=y, num_whole=len(chosen), whole_y=data.labels[chosen], first=number == 0)
        with _tapped(model, phase) as taps:
            for term in client.terms(batch, phase):
                loss += _backward(term, batch, params, kept.get(term.name))
            if phase.taps:
                client.observe(batch, taps, phase)
    for name, param in params.items():
        grad = param.grad if param.grad is not None else torch.zeros_like(param)
        with torch.no_grad():
            client.adjust(name, param, grad, {term: grads[name] for term, grads in kept.items() if name in grads})
        optimizer.step(name, param, grad, settings.learning_rate)
        param.grad = None  # freed one by one: the next batch's activations take its place
    with torch.no_grad():
        client.after_step(params, settings.learning_rate)
    return loss


def _backward(term: Term, batch: Batch, params: Mapping[str, nn.Parameter], apart: dict[str, Tensor] | None) -> float:
    """Add the term's gradient to `param.grad`, or to `apart`; returns the term's share of the step's loss."""
    value = _value(term, batch)
    if value is None:
        return 0.0
    if value.requires_grad and apart is None:
        value.backward()  # type: ignore[no-untyped-call]
    elif value.requires_grad and apart is not None:
        grads = torch.autograd.grad(value, list(params.values()), allow_unused=True)
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                apart[name] = apart[name].add_(grad) if name in apart else grad
    return value.item()


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
    if term.denominator == 0:  # nobody in the whole batch takes part
        return None
    return term.weight * (term.each * term.mask).sum() / term.denominator


@contextmanager
def _tapped(model: Model, phase: Phase) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs at the phase's taps, detached, from the first forward pass of a piece."""
    seen: dict[str, Tensor] = {}

    def hook(tap: str) -> Callable[[nn.Module, object, Tensor], None]:
        def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
            seen.setdefault(tap, output.detach())

        return keep

    unknown = phase.taps - model.taps.keys()
    if unknown:
        raise ValueError(f"phase {phase.name!r} observes {sorted(unknown)[0]!r}; the model has {', '.join(model.taps)}")
    handles = [model.get_submodule(model.taps[tap]).register_forward_hook(hook(tap)) for tap in sorted(phase.taps)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
