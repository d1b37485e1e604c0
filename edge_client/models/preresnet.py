"""`preresnet20`: nine pre-activation blocks for small images (He et al., Identity Mappings, ECCV 2016), as in FeDepth.

A 3x3 stem, three stages of three blocks with 16, 32 and 64 channels, and a head of BatchNorm, ReLU, mean and linear.
The blocks are `block1` to `block9`: B1 to B9 of FeDepth's Table 1. With 3 channels and 10 classes 272,282 parameters;
269,722 with `shortcut = "pad"`; 32 more with the stem's BatchNorm, which FeDepth's released code has.

A block takes its input as it is for the identity; that code takes the activated one, because an empty sequence stands
there. The 1x1 convolution of a shortcut reads the activated input, as He et al. say.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from edge_client.errors import InputError
from edge_client.models.axes import inner_axes
from edge_client.models.contract import Staged
from edge_client.models.recompute import Fusible
from edge_client.models.resnet import convolution, main_path_anchors
from edge_client.models.slicing import FULL, SliceSpec

__all__ = ["preresnet"]

_STAGES = 3
_BLOCKS = 3  # per stage; 2 convolutions each, the stem's and the linear layer: 20


def preresnet(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    width: int,
    shortcut: str,
    stem_norm: bool,
    track_running_stats: bool,
    spec: SliceSpec = FULL,
) -> Staged:
    """`width` channels in the first stage; `shortcut` is conv or pad, where a stage begins."""
    if spec.narrows and shortcut == "pad":  # the channels of a slice would not go where those of the full network go
        raise InputError(f'slice {str(spec)!r}: shortcut = "pad" has no slices of the width; use conv')

    def norm(channels: int) -> nn.BatchNorm2d:
        return nn.BatchNorm2d(channels, track_running_stats=track_running_stats)

    channels = spec.channels(width)
    stem: OrderedDict[str, nn.Module] = OrderedDict(conv=convolution(input_shape[0], channels, kernel=3))
    if stem_norm:
        stem["norm"] = norm(channels)
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(stem))
    taps = {"conv_1": "stem.norm" if stem_norm else "stem.conv"}
    stages = [0]
    for stage, num_blocks in enumerate(spec.blocks([_BLOCKS] * _STAGES, [0, *[1] * (_STAGES - 1)], exits=True)):
        wide = spec.channels(width * 2**stage)
        for index in range(num_blocks):
            name, norms = f"block{stage * _BLOCKS + index + 1}", (norm(channels), norm(wide))
            stride = 2 if stage > 0 and index == 0 else 1
            units[name] = _Block(channels, wide, norms=norms, stride=stride, shortcut=shortcut)
            stages.append(stage + 1)
            taps |= {f"conv_{len(taps) + 1}": f"{name}.norm2", f"conv_{len(taps) + 2}": f"{name}.conv2"}
            channels = wide
    units["head"] = _head(norm(channels), channels, num_classes)
    return Staged(
        units,
        stages=[*stages, _STAGES + 1],
        taps={**taps, "features": "head.flatten"},
        axes=inner_axes(inputs="stem.conv", outputs="head.linear") if shortcut == "conv" else None,
        anchors=main_path_anchors(units, stages),
    )


def _head(norm: nn.BatchNorm2d, channels: int, num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=norm,
            relu=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            linear=nn.Linear(channels, num_classes),
        )
    )


class _Block(Fusible):
    """norm-ReLU-conv-norm-ReLU-conv, added to the input or to what its shortcut makes of it."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        norms: tuple[nn.BatchNorm2d, nn.BatchNorm2d],
        stride: int,
        shortcut: str,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.conv1 = convolution(in_channels, out_channels, kernel=3, stride=stride)
        self.conv2 = convolution(out_channels, out_channels, kernel=3)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module | None = None
        if stride > 1 and shortcut == "pad":
            self.shortcut = _Pad(out_channels - in_channels, stride)
        elif stride > 1:
            self.shortcut = convolution(in_channels, out_channels, kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        projection = [self.shortcut] if isinstance(self.shortcut, nn.Conv2d) else []
        out, *projected = self.norm_relu_conv(x, self.norm1, self.relu, self.conv1, *projection)
        (out,) = self.norm_relu_conv(out, self.norm2, self.relu, self.conv2, last=True)
        if projected:
            return out + projected[0]
        return out + (x if self.shortcut is None else self.shortcut(x))


class _Pad(nn.Module):
    """Every `stride`-th row and column, and channels of zeros on both sides."""

    def __init__(self, num_zeros: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.sides = (num_zeros // 2, num_zeros - num_zeros // 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, *self.sides))
