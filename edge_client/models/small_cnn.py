"""`small-cnn`: two blocks of 3x3 convolution, ReLU and pooling, and a linear head; for digits and small images.

With the default width of 32: 21 k parameters on 1x8x8, 29 k on 1x28x28, 30 k on 3x32x32 (10 classes).
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

__all__ = ["small_cnn"]

_POOLED = 4  # the second block's output is pooled to at most 4x4, so that the head does not grow with the image


def small_cnn(input_shape: tuple[int, ...], num_classes: int, *, width: int) -> nn.Sequential:
    """conv-ReLU-pool, conv-ReLU-pool, linear: a stem, a block and a head."""
    channels, height, breadth = input_shape
    # 28x28 -> 14x14 -> 4x4; the same floor division as MaxPool2d's own
    kernel = (max(2, height // 2 // _POOLED), max(2, breadth // 2 // _POOLED))
    pooled = (height // 2 // kernel[0]) * (breadth // 2 // kernel[1])
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem=_block(channels, width, (2, 2)),
        block1=_block(width, 2 * width, kernel),
        head=nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(2 * width * pooled, num_classes))),
    )
    return nn.Sequential(layers)


def _block(in_channels: int, out_channels: int, kernel: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(kernel),
        )
    )
