"""`small-cnn`: two blocks of 3x3 convolution, ReLU and pooling, and a linear head; for digits and small images.

With the default width of 32: 21 k parameters on 1x8x8, 29 k on 1x28x28, 30 k on 3x32x32 (10 classes).
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from edge_client.models.axes import WHOLE, Axis, inner_axes
from edge_client.models.contract import Staged
from edge_client.models.slicing import FULL, SliceSpec

__all__ = ["small_cnn"]

_POOLED = 4  # the second block's output is pooled to at most 4x4, so that the head does not grow with the image


def small_cnn(input_shape: tuple[int, ...], num_classes: int, *, width: int, spec: SliceSpec = FULL) -> Staged:
    """conv-ReLU-pool, conv-ReLU-pool, linear: a stem, a block and a head."""
    spec.blocks([1], [1])
    channels, height, breadth = input_shape
    # 28x28 -> 14x14 -> 4x4; the same floor division as MaxPool2d's own
    kernel = (max(2, height // 2 // _POOLED), max(2, breadth // 2 // _POOLED))
    pooled = (height // 2 // kernel[0]) * (breadth // 2 // kernel[1])
    narrow, wide = spec.channels(width), spec.channels(2 * width)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem=_block(channels, narrow, (2, 2)),
        block1=_block(narrow, wide, kernel),
        head=nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(wide * pooled, num_classes))),
    )
    axes = inner_axes(inputs="stem.conv", outputs="head.linear")
    return Staged(
        layers,
        taps={"conv_1": "stem.conv", "conv_2": "block1.conv", "features": "head.flatten"},
        axes=axes | {"head.linear.weight": (WHOLE, Axis((wide,), repeat=pooled))},
    )


def _block(in_channels: int, out_channels: int, kernel: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(kernel),
        )
    )
