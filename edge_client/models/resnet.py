"""`resnet10` ... `resnet152`: residual networks (He et al., Deep Residual Learning, CVPR 2016).

Four stages behind a 7x7 stem: blocks of two convolutions with 64, 128, 256 and 512 channels up to 34 layers, bottleneck
blocks of three, which put out four times as many, from 50 on. The stride of a bottleneck is at its 3x3 convolution.
The smaller networks of a kind own the first blocks of every stage of the larger ones under the same names, so that
their weights can be averaged by name.

| model | blocks per stage | parameters (3 channels, 10 classes) |
|---|---|---|
| `resnet10` | 1, 1, 1, 1 | 4,910,922 |
| `resnet14` | 1, 1, 2, 2 | 10,812,234 |
| `resnet18` | 2, 2, 2, 2 | 11,181,642 |
| `resnet22` | 2, 2, 3, 3 | 17,082,954 |
| `resnet26` | 3, 3, 3, 3 | 17,452,362 |
| `resnet34` | 3, 4, 6, 3 | 21,289,802 |
| `resnet50` | 3, 4, 6, 3 | 23,528,522 |
| `resnet101` | 3, 4, 23, 3 | 42,520,650 |
| `resnet152` | 3, 8, 36, 3 | 58,164,298 |
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from edge_client.models.anchors import first_of_shape
from edge_client.models.axes import inner_axes
from edge_client.models.contract import Staged
from edge_client.models.recompute import Fusible
from edge_client.models.slicing import FULL, SliceSpec

__all__ = ["Norm", "convolution", "image_stem", "main_path_anchors", "resnet"]

Norm = Callable[[int], nn.BatchNorm2d]  # of so many channels

_EXPANSION = 4  # what a bottleneck puts out, in widths of its 3x3 convolution


def resnet(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    blocks: Sequence[int],
    base_width: int,
    small_stem: bool,
    bottleneck: bool = False,
    track_running_stats: bool = True,
    spec: SliceSpec = FULL,
) -> Staged:
    """`blocks` per stage; each stage has twice the channels of the one before, the first `base_width`."""
    norm = partial(nn.BatchNorm2d, track_running_stats=track_running_stats)
    channels = spec.channels(base_width)
    stem = image_stem(input_shape[0], channels, small=small_stem, norm=norm)
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    stages = [0]
    taps = {"conv_1": "stem.norm"}
    num_convs = 3 if bottleneck else 2
    least = [int(bottleneck), *[1] * (len(blocks) - 1)]
    for stage, num_blocks in enumerate(spec.blocks(blocks, least, exits=True), start=1):
        width = base_width * 2 ** (stage - 1)
        for number in range(1, num_blocks + 1):
            name, stride = f"stage{stage}_block{number}", 2 if stage > 1 and number == 1 else 1
            if bottleneck:
                widths = (channels, spec.channels(width), spec.channels(_EXPANSION * width))
                units[name] = _Bottleneck(*widths, stride=stride, project=number == 1, norm=norm)
            else:
                units[name] = _Block(channels, spec.channels(width), stride=stride, norm=norm)
            stages.append(stage)
            taps |= {f"conv_{len(taps) + conv}": f"{name}.norm{conv}" for conv in range(1, num_convs + 1)}
            channels = spec.channels(_EXPANSION * width if bottleneck else width)
    units["head"] = nn.Sequential(
        OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), linear=nn.Linear(channels, num_classes))
    )
    return Staged(
        units,
        stages=[*stages, len(blocks) + 1],
        taps={**taps, "features": "head.flatten"},
        axes=inner_axes(inputs="stem.conv", outputs="head.linear"),
        anchors=main_path_anchors(units, stages),
    )


def main_path_anchors(units: OrderedDict[str, nn.Module], stages: Sequence[int]) -> dict[str, str]:
    """InCo's rule for residual networks: no shortcuts, and nothing before the second convolution of a stage."""
    weights, begun = [], {0}
    for (name, block), stage in zip(units.items(), stages, strict=False):  # the head has no stage yet
        convs = {part: layer for part, layer in block.named_children() if isinstance(layer, nn.Conv2d)}
        for part in sorted(convs.keys() - {"shortcut"}):
            if part == "conv1" and stage not in begun:
                begun.add(stage)
            elif stage > 0:
                weights.append((stage, f"{name}.{part}.weight", tuple(convs[part].weight.shape)))
    return first_of_shape(weights)


def convolution(in_channels: int, out_channels: int, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Without bias, as a BatchNorm follows; zeros around it keep the size up to the stride."""
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    # the variance of He et al.; uniform, as a normal_ on the meta device would load 77 MB of torch's shape functions
    nn.init.kaiming_uniform_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def image_stem(channels: int, width: int, *, small: bool, norm: Norm) -> nn.Sequential:
    """A quarter of the height and width for the blocks; the small one leaves images as large as they are."""
    kernel, stride = (3, 1) if small else (7, 2)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=convolution(channels, width, kernel=kernel, stride=stride), norm=norm(width), relu=nn.ReLU()
    )
    if not small:
        layers["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(layers)


class _Block(Fusible):
    """conv-norm-ReLU-conv-norm, added to the input, then ReLU; a 1x1 convolution fits the input where shapes differ."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = convolution(in_channels, out_channels, kernel=3, stride=stride)
        self.norm1 = norm(out_channels)
        self.conv2 = convolution(out_channels, out_channels, kernel=3)
        self.norm2 = norm(out_channels)
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            conv = convolution(in_channels, out_channels, kernel=1, stride=stride)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=norm(out_channels)))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        (out,) = self.norm_relu_conv(self.conv1(x), self.norm1, self.relu, self.conv2)
        out = self.norm2(out)
        out = out + (x if self.shortcut is None else self.shortcut(x))
        summed: Tensor = self.relu(out)
        return summed


class _Bottleneck(Fusible):
    """1x1, 3x3 and 1x1 convolution, each with its norm, added to the input or to its projection, then ReLU."""

    def __init__(
        self, in_channels: int, channels: int, out_channels: int, *, stride: int, project: bool, norm: Norm
    ) -> None:
        super().__init__()
        self.conv1 = convolution(in_channels, channels, kernel=1)
        self.norm1 = norm(channels)
        self.conv2 = convolution(channels, channels, kernel=3, stride=stride)
        self.norm2 = norm(channels)
        self.conv3 = convolution(channels, out_channels, kernel=1)
        self.norm3 = norm(out_channels)
        self.shortcut: nn.Sequential | None = None
        if project:
            conv = convolution(in_channels, out_channels, kernel=1, stride=stride)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=norm(out_channels)))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        (out,) = self.norm_relu_conv(self.conv1(x), self.norm1, self.relu, self.conv2)
        (out,) = self.norm_relu_conv(out, self.norm2, self.relu, self.conv3)
        out = self.norm3(out)
        out = out + (x if self.shortcut is None else self.shortcut(x))
        summed: Tensor = self.relu(out)
        return summed
