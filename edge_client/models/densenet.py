"""`densenet121` ... `densenet201`: densely connected networks (Huang et al., Densely Connected Networks, CVPR 2017).

A layer (norm-ReLU-1x1-norm-ReLU-3x3) adds `growth` channels to all that came before it in its stage; a transition
(norm-ReLU-1x1-pooling) halves channels and size before the next stage. Units are `stem`, `stage1_layer1`, ...,
`stage2_transition`, `stage2_layer1`, ..., `head`: a layer's output has its input as the first channels.

| model | layers per stage | growth, stem | parameters (3 channels, 10 classes) |
|---|---|---|---|
| `densenet121` | 6, 12, 24, 16 | 32, 64 | 6,964,106 |
| `densenet161` | 6, 12, 36, 24 | 48, 96 | 26,494,090 |
| `densenet169` | 6, 12, 32, 32 | 32, 64 | 12,501,130 |
| `densenet201` | 6, 12, 48, 32 | 32, 64 | 18,112,138 |

Taps: `conv_k` is the norm that comes next behind the k-th convolution. Behind the second one of a layer that is the
next unit's norm, which reads the layer's channels together with all before them; behind the last one the head's.
Pooling rounds odd sizes up, where the original drops a row: images of 28x28 would be gone before the last stage.
Does not cover: slices of the depth, since all that follows a layer reads its channels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from edge_client.models.axes import CHANNELS, WHOLE, Axis, inner_axes
from edge_client.models.contract import Staged
from edge_client.models.recompute import Fusible
from edge_client.models.resnet import Norm, convolution, image_stem
from edge_client.models.slicing import FULL, SliceSpec

__all__ = ["densenet"]

_BOTTLENECK = 4  # channels between the two convolutions of a layer, in growths


def densenet(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    layers: Sequence[int],
    growth: int,
    base_width: int,
    small_stem: bool,
    track_running_stats: bool = True,
    spec: SliceSpec = FULL,
) -> Staged:
    """`layers` per stage, each adding `growth` channels; `base_width` channels behind the stem."""
    norm = partial(nn.BatchNorm2d, track_running_stats=track_running_stats)
    counts = [number + (stage > 0) for stage, number in enumerate(layers)]  # with the transition
    spec.blocks(counts, counts)
    width, groups = base_width, [spec.channels(base_width)]  # channels of the full network; those here, as they came
    stem = image_stem(input_shape[0], groups[0], small=small_stem, norm=norm)
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    axes = inner_axes(inputs="stem.conv", outputs="head.linear")
    for stage, number in enumerate(layers, start=1):
        if stage > 1:
            width //= 2
            name = f"stage{stage}_transition"
            units[name] = _transition(sum(groups), spec.channels(width), norm)
            axes |= _reading(f"{name}.norm", f"{name}.conv", groups)
            groups = [spec.channels(width)]
        for name in (f"stage{stage}_layer{index}" for index in range(1, number + 1)):
            units[name] = _Layer(sum(groups), spec.channels(_BOTTLENECK * growth), spec.channels(growth), norm)
            axes |= _reading(f"{name}.norm1", f"{name}.conv1", groups)
            groups.append(spec.channels(growth))
            width += growth
    units["head"] = _head(sum(groups), num_classes, norm)
    axes |= _reading("head.norm", "", groups) | {"head.linear.weight": (WHOLE, Axis(tuple(groups)))}
    stages = [0, *(stage for stage, count in enumerate(counts, start=1) for _ in range(count)), len(layers) + 1]
    return Staged(units, stages=stages, taps={**_conv_taps(units), "features": "head.flatten"}, axes=axes)


def _reading(norm: str, conv: str, groups: Sequence[int]) -> dict[str, tuple[Axis | None, ...]]:
    """Axes of a norm, and of the convolution behind it, that read groups of channels side by side."""
    axis = Axis(tuple(groups))
    axes: dict[str, tuple[Axis | None, ...]] = {
        f"{norm}.{tensor}": (axis,) for tensor in ("weight", "bias", "running_mean", "running_var")
    }
    return axes | ({f"{conv}.weight": (CHANNELS, axis)} if conv else {})


def _conv_taps(units: Mapping[str, nn.Module]) -> dict[str, str]:
    """Each convolution's next norm, in the order in which they run."""
    taps: dict[str, str] = {}
    num_convs = 0
    for unit, module in units.items():
        for name, layer in module.named_modules(prefix=unit):
            num_convs += isinstance(layer, nn.Conv2d)
            if isinstance(layer, nn.BatchNorm2d) and num_convs > len(taps):
                taps[f"conv_{num_convs}"] = name
    return taps


def _transition(in_channels: int, out_channels: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=norm(in_channels),
            relu=nn.ReLU(),
            conv=convolution(in_channels, out_channels, kernel=1),
            pool=nn.AvgPool2d(2, ceil_mode=True),
        )
    )


def _head(channels: int, num_classes: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=norm(channels),
            relu=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            linear=nn.Linear(channels, num_classes),
        )
    )


class _Layer(Fusible):
    """norm-ReLU-1x1-norm-ReLU-3x3; its output is its input followed by the new channels."""

    def __init__(self, in_channels: int, between: int, growth: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(in_channels)
        self.conv1 = convolution(in_channels, between, kernel=1)
        self.norm2 = norm(between)
        self.conv2 = convolution(between, growth, kernel=3)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        (out,) = self.norm_relu_conv(x, self.norm1, self.relu, self.conv1)
        (out,) = self.norm_relu_conv(out, self.norm2, self.relu, self.conv2)
        return torch.cat((x, out), dim=1)
