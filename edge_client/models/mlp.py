"""`mlp`: linear layers with ReLU between them, on inputs of any shape."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

__all__ = ["mlp"]


def mlp(input_shape: tuple[int, ...], num_classes: int, *, hidden: Sequence[int]) -> nn.Sequential:
    """Flatten, one unit per hidden layer, and a linear head."""
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Flatten())
    width = math.prod(input_shape)
    for number, next_width in enumerate(hidden, start=1):
        units[f"block{number}"] = nn.Sequential(OrderedDict(linear=nn.Linear(width, next_width), relu=nn.ReLU()))
        width = next_width
    units["head"] = nn.Linear(width, num_classes)
    return nn.Sequential(units)
