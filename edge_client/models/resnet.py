"""`resnet10` ... `resnet34`: residual networks of basic blocks (He et al., Deep Residual Learning, CVPR 2016).

Four stages of two-convolution blocks with 64, 128, 256 and 512 channels behind a 7x7 stem. The smaller networks own the
first blocks of every stage of the larger ones under the same names, so that their weights can be averaged by name.

| model | blocks per stage | parameters (3 channels, 10 classes) |
|---|---|---|
| `resnet10` | 1, 1, 1, 1 | 4,910,922 |
| `resnet14` | 1, 1, 2, 2 | 10,812,234 |
| `resnet18` | 2, 2, 2, 2 | 11,181,642 |
| `resnet22` | 2, 2, 3, 3 | 17,082,954 |
| `resnet26` | 3, 3, 3, 3 | 17,452,362 |
| `resnet34` | 3, 4, 6, 3 | 21,289,802 |

Does not cover: bottleneck blocks (50 layers and more).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from edge_client.models.contract import Staged
from edge_client.models.recompute import Fusible

__all__ = ["convolution", "resnet"]


def resnet(
    input_shape: tuple[int, ...], num_classes: int, *, blocks: Sequence[int], base_width: int, small_stem: bool
) -> Staged:
    """`blocks` per stage; each stage has twice the channels of the one before, the first `base_width`."""
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(input_shape[0], base_width, small=small_stem))
    stages = [0]
    taps = {"conv_1": "stem.norm"}
    channels = base_width
    for stage, num_blocks in enumerate(blocks, start=1):
        width = base_width * 2 ** (stage - 1)
        for number in range(1, num_blocks + 1):
            name = f"stage{stage}_block{number}"
            units[name] = _Block(channels, width, stride=2 if stage > 1 and number == 1 else 1)
            stages.append(stage)
            taps |= {f"conv_{len(taps) + 1}": f"{name}.norm1", f"conv_{len(taps) + 2}": f"{name}.norm2"}
            channels = width
    units["head"] = nn.Sequential(
        OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), linear=nn.Linear(channels, num_classes))
    )
    return Staged(units, stages=[*stages, len(blocks) + 1], taps={**taps, "features": "head.flatten"})


def convolution(in_channels: int, out_channels: int, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Without bias, as a BatchNorm follows; zeros around it keep the size up to the stride."""
    made = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    # the variance of He et al.; uniform, as a normal_ on the meta device would load 77 MB of torch's shape functions
    nn.init.kaiming_uniform_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


def _stem(channels: int, width: int, *, small: bool) -> nn.Sequential:
    """A quarter of the height and width for the blocks; the small one leaves images as large as they are."""
    kernel, stride = (3, 1) if small else (7, 2)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=convolution(channels, width, kernel=kernel, stride=stride), norm=nn.BatchNorm2d(width), relu=nn.ReLU()
    )
    if not small:
        layers["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(layers)


class _Block(Fusible):
    """conv-norm-ReLU-conv-norm, added to the input, then ReLU; a 1x1 convolution fits the input where shapes differ."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(in_channels, out_channels, kernel=3, stride=stride)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = convolution(out_channels, out_channels, kernel=3)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            conv = convolution(in_channels, out_channels, kernel=1, stride=stride)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(out_channels)))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        (out,) = self.norm_relu_conv(self.conv1(x), self.norm1, self.relu, self.conv2)
        out = self.norm2(out)
        out = out + (x if self.shortcut is None else self.shortcut(x))
        summed: Tensor = self.relu(out)
        return summed
