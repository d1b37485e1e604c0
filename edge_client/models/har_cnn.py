"""`har-cnn`: convolutions along the time of sensor windows, [channels, length], for human activities and the like.

A stem and two stages of two blocks, each convolution, BatchNorm and ReLU; the stem's pooling and the second stage's
first block halve the length. With 9 channels and 10 classes 43,498 parameters, whatever the length. All that is behind
the first block of a stage can be left out (slices of the depth).
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from torch import nn

from edge_client.models.axes import inner_axes
from edge_client.models.contract import Staged
from edge_client.models.slicing import FULL, SliceSpec

__all__ = ["har_cnn"]

_KERNEL = 5
_BLOCKS = (2, 2)  # per stage


def har_cnn(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    width: int,
    track_running_stats: bool = True,
    spec: SliceSpec = FULL,
) -> Staged:
    """`width` channels in the first stage, twice as many in the second."""
    block = partial(_block, track_running_stats=track_running_stats)
    channels = spec.channels(width)
    stem = block(input_shape[0], channels, stride=1)
    stem.add_module("pool", nn.MaxPool1d(2))
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    stages = [0]
    for stage, num_blocks in enumerate(spec.blocks(_BLOCKS, (0, 1)), start=1):
        for number in range(1, num_blocks + 1):
            wide = spec.channels(width * stage)
            units[f"stage{stage}_block{number}"] = block(channels, wide, stride=2 if (stage, number) == (2, 1) else 1)
            stages.append(stage)
            channels = wide
    taps = {f"conv_{number}": f"{name}.norm" for number, name in enumerate(units, start=1)}
    units["head"] = nn.Sequential(
        OrderedDict(pool=nn.AdaptiveAvgPool1d(1), flatten=nn.Flatten(), linear=nn.Linear(channels, num_classes))
    )
    return Staged(
        units,
        stages=[*stages, len(_BLOCKS) + 1],
        taps={**taps, "features": "head.flatten"},
        axes=inner_axes(inputs="stem.conv", outputs="head.linear"),
    )


def _block(in_channels: int, out_channels: int, *, stride: int, track_running_stats: bool) -> nn.Sequential:
    conv = nn.Conv1d(in_channels, out_channels, _KERNEL, stride=stride, padding=_KERNEL // 2, bias=False)
    nn.init.kaiming_uniform_(conv.weight, mode="fan_out", nonlinearity="relu")
    norm = nn.BatchNorm1d(out_channels, track_running_stats=track_running_stats)
    return nn.Sequential(OrderedDict(conv=conv, norm=norm, relu=nn.ReLU()))
