"""HeteroFL. Diao et al., "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021.

A device that has no memory for the whole model trains a narrower one: the first ceil(r c) of the c channels of every
layer, cut out of the server's model. The server takes the mean of each element over those that have it. Down and up: a
slice of the model.

    r = 1, 1/2, 1/4, 1/8, 1/16     levels a to e of the paper; here the slices of the run
    scaler    y <- y / r           behind each layer while training, so that a narrow model's sums are a wide one's
    mask      logits of classes that a device has not are 0 in its loss; their rows of the output layer are not its own

Deviations: BatchNorm keeps running statistics, which are averaged like weights, where the paper makes them after the
training in a pass over the data of all devices: no data leave a device here. They are those of unscaled outputs, so the
scaler is for models without normalisation; a normalisation divides any factor out again. A device has the largest slice
that its memory holds (`fix` in the authors' code), or with `redraw` one of those it could hold, drawn in every round
(`dynamic`, which draws from all). The gradient's norm is not clipped. A device whose owner does not let it tell its
classes (`share.class-statistics`) has no mask, and one that has too few samples of a class does not tell of it.

Legend: r = share of the channels, m = devices that have an element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from edge_client.device.accelerator import device_of
from edge_client.errors import InputError
from edge_client.methods.base import (
    Batch,
    Frozen,
    Header,
    Job,
    Method,
    Outcome,
    Phase,
    PlainClient,
    State,
    Term,
    Travel,
    no_notes,
)
from edge_client.methods.cards.heterofl import HeteroFLParameters
from edge_client.methods.fedavg import CoverageServer
from edge_client.models.axes import CHANNELS, WHOLE
from edge_client.models.contract import Model
from edge_client.models.slicing import parse
from edge_client.params import IndexMap, coverage_mean
from edge_client.training.objectives import cross_entropy

__all__ = ["HeteroFLClient", "HeteroFLServer", "method"]

_HEAD = "by_class"  # note: tensors whose first axis are the classes
_CLASS = "class/"  # scalar of an update: the device has this class
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


class HeteroFLClient(PlainClient):
    """Cross entropy, with outputs scaled up and absent classes masked."""

    def __init__(self, parameters: HeteroFLParameters) -> None:
        self._parameters = parameters
        self._present: Tensor | None = None

    def begin(self, job: Job) -> None:
        """Scale the outputs of the layers of a narrower model."""
        super().begin(job)
        ratio = float(parse(job.slice).width)
        if self._parameters.scaler and ratio < 1 and not any(isinstance(part, _NORMS) for part in job.model.modules()):
            for layer in _sliced_layers(job.model):
                layer.register_forward_hook(partial(_scale, ratio))
        if self._parameters.mask and job.class_min_count is not None:
            self._present = device_of(job.model).move(torch.tensor([count > 0 for count in job.class_counts]))

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """With a mask, logits of classes that no sample here has are 0."""
        if self._present is None:
            yield from super().terms(batch, phase)
            return
        logits = self.job.model(batch.x)
        yield Term(name="cross_entropy", each=cross_entropy(logits.masked_fill(~self._present, 0.0), batch.y))

    def end(self) -> Outcome:
        """With a mask, the classes that the device has, of those that its owner lets out."""
        if self._present is None or self.job.class_min_count is None:
            return Outcome()
        least = max(1, self.job.class_min_count)
        classes = [number for number, count in enumerate(self.job.class_counts) if count >= least]
        return Outcome(scalars={f"{_CLASS}{number}": 1.0 for number in classes})


def _scale(ratio: float, layer: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output / ratio if layer.training else output


def _sliced_layers(model: Model) -> Iterator[nn.Module]:
    """The layers whose outputs are a part of the channels: all but the one whose outputs are the classes."""
    axes = model.channel_axes or {}
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, nn.Parameter) and axes.get(f"{name}.weight", (CHANNELS,))[0] is not WHOLE:
            yield layer


class HeteroFLServer(CoverageServer):
    """The coverage mean; with masks, rows of the output layer count where the device has the class."""

    def fold(self, state: State, frozen: Frozen, *, round: int) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the new state."""
        by_class = frozenset(state.notes.get(_HEAD, ()))
        for name in state.names():
            old = state.tensor(name)
            fold = self._fold_rows if name in by_class else self.fold_tensor
            yield name, fold(name, old, frozen)

    def _fold_rows(self, name: str, old: Tensor, frozen: Frozen) -> Tensor:
        parts = (
            (value.index_select(0, rows), _at(old, where, rows), self.weight(header))
            for header, value, where in frozen.column(name)
            for rows in (_rows(header, len(old)),)
        )
        return coverage_mean(old, parts)


def _rows(header: Header, num_classes: int) -> Tensor:
    """The classes of a device; all of them if it does not say which."""
    classes = [number for number in range(num_classes) if header.scalars.get(f"{_CLASS}{number}") == 1.0]
    return torch.tensor(classes or range(num_classes), dtype=torch.int64)


def _at(old: Tensor, where: IndexMap | None, rows: Tensor) -> IndexMap:
    """The place of these rows; classes are never sliced, so the first axis of an upload has all of them."""
    others = where[1:] if where is not None else tuple(torch.arange(size) for size in old.shape[1:])
    return (rows, *others)


def _by_class(model: Model) -> Mapping[str, Any]:
    """The tensors whose rows are the classes."""
    if model.channel_axes is None:
        raise InputError(
            "method 'heterofl': mask needs to know the output layer, and this model does not tell its channels; "
            "use a built-in model, or mask = false"
        )
    axes, head = model.channel_axes, model.units[-1].parameters
    return {_HEAD: tuple(name for name in head if axes.get(name, (CHANNELS,))[0] is WHOLE)}


def method(parameters: HeteroFLParameters) -> Method:
    """HeteroFL, for the registry."""
    return Method(
        client=partial(HeteroFLClient, parameters),
        server=HeteroFLServer(uniform=parameters.uniform),
        travel=Travel(notes=_by_class if parameters.mask else no_notes),
    )
