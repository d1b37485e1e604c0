"""Runs a trained model group by group: only the weights of one group are in memory, activations lie on disk.

    for each group of units: load its weights, run all samples through it, a batch at a time, drop its weights

The peak is that of the largest group: its weights, and the activations of one batch. Outputs are those of a plain
forward pass with the same batches, bit for bit: BatchNorms are in evaluation mode, and one without running statistics
takes those of its batch, so that the size of a batch belongs to the result.
Covers: running, what units need, groups for a budget. Does not cover: where weights come from (`Weights`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from edge_client.config.quantities import format_bytes
from edge_client.errors import NothingFitsError, PayloadError
from edge_client.models.contract import Model, count_outputs
from edge_client.training.inputs import Data, mixes_samples
from edge_client.training.loop import pieces_of
from edge_client.training.row_file import RowFile

__all__ = ["UnitSize", "Weights", "fit_groups", "loaded", "predict_depthwise", "release", "survey"]

Weights = Callable[[str], Tensor]  # name of a parameter or buffer in the model -> its value
Groups = Sequence[Sequence[str]]

_FLOAT = 4
_SAMPLES = 2  # a BatchNorm without running statistics refuses one value per channel
_MARGIN = 1.05
_THREAD_BYTES = 5 * 2**20  # what libraries keep, for each thread


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """The memory that a unit needs."""

    name: str
    weight_bytes: int
    activation_bytes: int  # of one sample: the input, and what every layer puts out


def predict_depthwise(
    model: Model, weights: Weights, data: Data, groups: Groups, folder: Path, microbatch: int
) -> Iterator[Tensor]:
    """Logits of each batch of `microbatch` samples in order; the last batch may be smaller.

    `groups` are all units in order. `model` needs no values before, and has none of these afterwards.
    """
    model.eval()
    pieces = pieces_of(torch.arange(len(data)), microbatch)
    *earlier, last = groups
    with ExitStack() as stack:
        activations: RowFile | None = None
        for group in earlier:
            outputs = stack.enter_context(RowFile(folder))
            with loaded(model, group, weights):
                for piece in pieces:
                    outputs.write(piece, _run(model, group, data, activations, piece))
            if activations is not None:
                activations.close()
            activations = outputs
        with loaded(model, last, weights):
            for piece in pieces:
                yield _run(model, last, data, activations, piece)


@torch.no_grad()
def _run(model: Model, group: Sequence[str], data: Data, activations: RowFile | None, piece: Tensor) -> Tensor:
    return model.run_units(group, data.batch(piece)[0] if activations is None else activations.read(piece))


@contextmanager
def loaded(model: Model, units: Sequence[str], weights: Weights) -> Iterator[None]:
    """Give the units their values for the length of the body; raises `PayloadError` for one of another shape."""
    owners = [owner for unit in units for owner in model.owners_of_unit(unit)]
    empty = [(owner, owner.value) for owner in owners]
    try:
        for owner in owners:
            value, like = weights(owner.name), owner.value
            if value.shape != like.shape:
                raise PayloadError(
                    "shape", f"tensor {owner.name!r} is {list(value.shape)}, expected {list(like.shape)}"
                )
            is_parameter = isinstance(like, nn.Parameter)
            owner.put(nn.Parameter(value, requires_grad=False) if is_parameter else value)
        yield
    finally:
        for owner, tensor in empty:
            owner.put(tensor)


def release(model: Model) -> None:
    """Free the memory of all values; shapes stay."""
    for unit in model.order:
        for owner in model.owners_of_unit(unit):
            like = owner.value
            empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
            owner.put(nn.Parameter(empty, requires_grad=False) if isinstance(like, nn.Parameter) else empty)


def survey(model: Model, weights: Weights, input_shape: Sequence[int]) -> list[UnitSize]:
    """The memory that each unit needs: two samples of zeros go through, with the weights of one unit at a time."""
    model.eval()
    unit_sizes = []
    x = torch.zeros(_SAMPLES, *input_shape)
    for name in model.order:
        unit, num_inputs = model.unit(name), x.numel()
        leaves = [part for part in unit.modules() if not any(part.children())]
        with loaded(model, [name], weights), torch.no_grad():
            sizes = [tensor.nbytes for tensor in unit.state_dict().values()]
            x, outputs = count_outputs(unit, x, leaves)
        per_sample = _FLOAT * (num_inputs + max(outputs, x.numel())) // _SAMPLES
        unit_sizes.append(UnitSize(name=name, weight_bytes=sum(sizes), activation_bytes=per_sample))
    return unit_sizes


def fit_groups(
    model: Model, sizes: Sequence[UnitSize], microbatch: int, budget_bytes: int
) -> tuple[list[list[str]], int]:
    """As few groups as fit, and the samples at a time: fewer than asked for only where that changes no output.

    Raises `NothingFitsError` with the smallest budget that would do.
    """
    fixed = any(mixes_samples(part) for part in model.modules())
    for size in [microbatch] if fixed else _halves(microbatch):
        if max(_needed([unit], size) for unit in sizes) <= budget_bytes:
            return _greedy(sizes, size, budget_bytes), size
    least = max(_needed([unit], microbatch if fixed else 1) for unit in sizes)
    hint = ", or smaller batches: --batch; they change the outputs of this model" if fixed else ""
    raise NothingFitsError(
        f"nothing fits: the largest unit needs {format_bytes(least)}, the budget is {format_bytes(budget_bytes)}; "
        f"a budget of {least} bytes would do{hint}",
        least_bytes=least,
    )


def _halves(size: int) -> Iterator[int]:
    while size >= 1:
        yield size
        size //= 2


def _greedy(sizes: Sequence[UnitSize], microbatch: int, budget_bytes: int) -> list[list[str]]:
    groups: list[list[UnitSize]] = [[]]
    for unit in sizes:
        if groups[-1] and _needed([*groups[-1], unit], microbatch) > budget_bytes:
            groups.append([])
        groups[-1].append(unit)
    return [[unit.name for unit in group] for group in groups]


def _needed(group: Sequence[UnitSize], microbatch: int) -> int:
    """Weights of all, activations of one at a time."""
    weights = sum(unit.weight_bytes for unit in group)
    activations = microbatch * max(unit.activation_bytes for unit in group)
    return math.ceil(_MARGIN * (weights + activations)) + _THREAD_BYTES * torch.get_num_threads()
