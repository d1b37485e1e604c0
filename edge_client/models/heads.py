"""From the middle of a model to its classes: the head that is there, or one of a block's own. Decided by shapes alone.

`fit` makes any activation an input of the head without parameters (FeDepth's skip connection). The first axis of an
activation is its channels, the others are positions:

    positions   every s-th row and column where the sizes are multiples, else adaptive average pooling
    channels    zeros on both sides, floor(gap / 2) of them on the left; where there are too many, means of neighbours
    a map in front of a head that takes a vector is flattened first; tokens as wide as the vector are averaged

Sub-sampling comes first: 16 channels of 32x32 padded to the 64 of a head are 4 times as large as they were, the 8x8
that are left of them, padded, a quarter. A head that pools at once could be given the mean instead; next to what a
block keeps for backward that would not show.

`auxiliary` makes a head for one block (m-FeDepth): BatchNorm, mean over positions, linear; for tokens that the model's
head could read, a head like that one; for vectors, linear. `alike` makes one like the model's own (ScaleFL), as an
architecture has it where it ends there.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from edge_client.errors import InputError
from edge_client.models.contract import Model, Unit
from edge_client.models.found_units.model import FoundModel

__all__ = ["alike", "auxiliary", "fit"]

_MAX_POSITION_AXES = 3
_POOLS: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}
_SAMPLERS: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def fit(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` [b, ...] as [b, *shape], without parameters."""
    stored, target = tuple(x.shape[1:]), tuple(shape)
    if stored == target:
        return x
    if len(stored) == 2 and len(target) == 1 and stored[1] == target[0] != stored[0]:
        return x.mean(dim=1)
    if len(stored) != len(target) or len(stored) > 1 + _MAX_POSITION_AXES:
        return _fit_channels(x.flatten(1), math.prod(target)).reshape(len(x), *target)
    return _fit_channels(_fit_positions(x, target[1:]), target[0])


def _fit_positions(x: Tensor, positions: tuple[int, ...]) -> Tensor:
    stored = tuple(x.shape[2:])
    if stored == positions:
        return x
    if all(size % count == 0 for size, count in zip(stored, positions, strict=True)):
        strides = tuple(size // count for size, count in zip(stored, positions, strict=True))
        # windows of one value: unlike that of x[:, :, ::4, ::4], the gradient lies in memory as x does
        return _SAMPLERS[len(positions)](x, 1, strides)
    return _POOLS[len(positions)](x, positions)


def _fit_channels(x: Tensor, channels: int) -> Tensor:
    gap = channels - x.shape[1]
    if gap == 0:
        return x
    if gap > 0:
        return F.pad(x, (0, 0) * (x.ndim - 2) + (gap // 2, gap - gap // 2))
    last = x.movedim(1, -1)
    pooled = F.adaptive_avg_pool1d(last.reshape(len(x), -1, x.shape[1]), channels)
    return pooled.reshape(*last.shape[:-1], channels).movedim(-1, 1)


def auxiliary(model: Model, unit: Unit) -> nn.Module:
    """A head for the output of `unit`, with random weights from torch's global generator."""
    head, shape = model.units[-1], unit.out_shape
    num_classes = math.prod(head.out_shape)
    if len(shape) == 2 and shape == head.in_shape and isinstance(model, FoundModel):
        return _TokenMean(shape[1], num_classes)  # a found unit is no copy: it is a part of the whole module
    if len(shape) == 2 and shape == head.in_shape:
        return copy.deepcopy(model.get_submodule(head.name))
    if math.prod(shape[1:]) > 1:
        return _Pooled(shape, num_classes)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(math.prod(shape), num_classes)))


def alike(model: Model, unit: Unit) -> nn.Module:
    """A head for the output of `unit` with the layers of the model's own, and random weights; raises `InputError`."""
    head, channels = model.units[-1], unit.out_shape[0]
    if isinstance(model, FoundModel):
        raise InputError("exits need a model that declares them; units of this one were found (use fedepth or fedavg)")
    new_head = copy.deepcopy(model.get_submodule(head.name))
    if len(unit.out_shape) == 2:  # tokens: all blocks are equally wide
        channels = unit.out_shape[1]
    if len(unit.out_shape) != len(head.in_shape):
        raise InputError(f"the model's head reads {list(head.in_shape)}, {unit.name!r} puts out {list(unit.out_shape)}")
    if not any(new_head.children()):
        return _resized(new_head, channels)
    for name, layer in list(new_head.named_modules()):
        if name and not any(layer.children()):
            parent, _, last = name.rpartition(".")
            setattr(new_head.get_submodule(parent), last, _resized(layer, channels))
    return new_head


def _resized(layer: nn.Module, channels: int) -> nn.Module:
    """A new layer of this kind for so many channels."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(channels, layer.out_features, bias=layer.bias is not None)
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return type(layer)(channels, track_running_stats=layer.track_running_stats)
    if isinstance(layer, nn.LayerNorm):
        return nn.LayerNorm(channels, eps=layer.eps)
    if any(True for _ in layer.parameters()):
        raise InputError(f"the model's head has a {type(layer).__name__}, which has no like for other channels")
    return layer


class _TokenMean(nn.Module):
    """LayerNorm, mean over all tokens, linear."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(x).mean(dim=1))
        return logits


class _Pooled(nn.Module):
    """BatchNorm, mean over all positions, linear. It is never evaluated: it needs no running statistics."""

    def __init__(self, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.norm = _NORMS[min(len(shape) - 1, _MAX_POSITION_AXES)](shape[0], track_running_stats=False)
        self.linear = nn.Linear(shape[0], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim > 2 + _MAX_POSITION_AXES:
            x = x.flatten(2 + _MAX_POSITION_AXES - 1)
        pooled = self.norm(x).mean(dim=tuple(range(2, x.ndim)))
        logits: Tensor = self.linear(pooled)
        return logits
