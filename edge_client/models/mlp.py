"""`mlp`: linear layers with ReLU between them, on inputs of any shape; its blocks stand in for convolutions as taps."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from edge_client.models.axes import inner_axes
from edge_client.models.contract import Staged
from edge_client.models.slicing import FULL, SliceSpec

__all__ = ["mlp"]


def mlp(input_shape: tuple[int, ...], num_classes: int, *, hidden: Sequence[int], spec: SliceSpec = FULL) -> Staged:
    """Flatten, one unit per hidden layer, each a stage of its own, and a linear head."""
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Flatten())
    width, stages = math.prod(input_shape), [0]
    least = [int(number == 0 or wide != hidden[number - 1]) for number, wide in enumerate(hidden)]
    for number, is_there in enumerate(spec.blocks([1] * len(hidden), least, exits=True)):
        if is_there:
            next_width = spec.channels(hidden[number])
            linear = nn.Linear(width, next_width)
            units[f"block{number + 1}"] = nn.Sequential(OrderedDict(linear=linear, relu=nn.ReLU()))
            stages.append(number + 1)
            width = next_width
    units["head"] = nn.Linear(width, num_classes)
    return Staged(
        units,
        stages=[*stages, len(hidden) + 1],
        taps={f"conv_{number}": name for number, name in enumerate(list(units)[1:-1], start=1)},
        axes=inner_axes(inputs="block1.linear", outputs="head") | ({} if hidden else {"head.weight": ()}),
    )
