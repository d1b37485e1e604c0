"""Small models of all kinds for `edge-client prove`: none is like another in what its layers take beside activations.

Each is a function of a size (1, 2, ...) and the number of classes, so that two sizes of one kind are two models. They
are what users bring: convolutions of every kind, recurrent layers, attention, norms, shared weights, operations in
place. Models of torchvision and timm are taken by name where those packages are installed.
Covers: building a module, and the shape of its samples. Does not cover: which are tried (`proof_cases`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from edge_client.task.task import Device, Task

__all__ = ["ARCHITECTURES", "Architecture", "Samples", "installed", "named", "task_of"]

_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of model."""

    build: Callable[[int, int], nn.Module]  # size, classes
    input_shape: _Shape
    units: Sequence[str] | None = None


class Samples(Dataset[tuple[Tensor, int]]):
    """Random samples, made when they are asked for."""

    classes = tuple(str(number) for number in range(10))

    def __init__(self, shape: _Shape, num_samples: int) -> None:
        self._shape, self._num_samples = shape, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(self._shape), index % len(self.classes)


def task_of(architecture: Architecture, size: int) -> Task:
    """A task with random samples, as many as the device's labels `samples` and `tests` say."""

    def samples(label: str) -> Callable[[Device], Samples]:
        return lambda device: Samples(architecture.input_shape, int(device.labels[label]))

    return Task(
        model=partial(architecture.build, size),
        units=architecture.units,
        train_data=samples("samples"),
        test_data=samples("tests"),
        input=architecture.input_shape,
    )


class _Residual(nn.Module):
    """The input and what a body makes of it, added in place or not."""

    def __init__(self, body: nn.Module, *, in_place: bool = False) -> None:
        super().__init__()
        self.body, self.in_place = body, in_place

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out.add_(x) if self.in_place else out + x


class _Repeated(nn.Module):
    """The same layer several times: its weights are shared."""

    def __init__(self, body: nn.Module, times: int) -> None:
        super().__init__()
        self.body, self.times = body, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.relu(self.body(x))
        return x


class _Concatenated(nn.Module):
    """Branches side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class _Gated(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, max(1, width // 4), 1), nn.Conv2d(max(1, width // 4), width, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True)))))
        return x * gate


class _Recurrent(nn.Module):
    """The last output of a recurrent layer, classified."""

    def __init__(self, layer: nn.RNNBase, classes: int) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.layer(x)
        return self.head(out[:, -1])  # type: ignore[no-any-return]


class _Attention(nn.Module):
    """Self-attention over the positions of a sequence."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attention(x, x, x, need_weights=False)
        return out  # type: ignore[no-any-return]


class _Mean(nn.Module):
    """Over all positions; `dims` are those to average."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)


class _Transposed(nn.Module):
    """Another layer on the last two dimensions exchanged."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class _Tokens(nn.Module):
    """Numbers between 0 and 1 as indices of an embedding."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.flatten(1) * (self.vocabulary - 1)).long().clamp_(0, self.vocabulary - 1)
        return self.embedding(tokens)  # type: ignore[no-any-return]


class _UNet(nn.Module):
    """Down, up, and connections across; classified by the mean."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.one, self.two = _conv(3, width), _conv(width, 2 * width, stride=2)
        self.three, self.up = _conv(2 * width, 4 * width, stride=2), nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.last, self.head = _conv(4 * width, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        two = self.two(one)
        up = torch.cat([self.up(self.three(two)), two], 1)
        return self.head(self.last(up).mean((2, 3)))  # type: ignore[no-any-return]


class _InPlace(nn.Module):
    """Operations that change their input."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.one, self.two, self.head = (
            nn.Conv2d(3, width, 3, padding=1),
            nn.Conv2d(width, width, 3, padding=1),
            nn.Linear(width, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu_(self.one(x), 0.1)
        x = self.two(x).add_(1.0).relu_()
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


class _MixerBlock(nn.Module):
    """A linear layer over positions, then one over channels."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(positions, 2 * positions), nn.GELU(), nn.Linear(2 * positions, positions))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.one(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.two(x))  # type: ignore[no-any-return]


def _conv(
    inside: int, outside: int, *, stride: int = 1, groups: int = 1, dilation: int = 1, size: int = 3
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, size, stride, size // 2 * dilation, dilation, groups, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


def _image(*layers: nn.Module, width: int, classes: int) -> nn.Module:
    """A classifier of images that ends with `width` channels."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def _stack(width: int, depth: int, block: Callable[[int], nn.Module], classes: int) -> nn.Module:
    """A stem, then equal blocks."""
    return _image(_conv(3, width), *(block(width) for _ in range(depth)), width=width, classes=classes)


def _depthwise(width: int) -> nn.Module:
    return nn.Sequential(_conv(width, width, groups=width), _conv(width, width, size=1))


def _inverted(width: int) -> nn.Module:
    inside = nn.Sequential(_conv(width, 4 * width, size=1), _conv(4 * width, 4 * width, groups=4 * width))
    return _Residual(nn.Sequential(inside, nn.Conv2d(4 * width, width, 1, bias=False), nn.BatchNorm2d(width)))


def _group_norm(width: int) -> nn.Module:
    return _Residual(nn.Sequential(nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)))


def _conv_next(width: int) -> nn.Module:
    conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
    return _Residual(
        nn.Sequential(
            conv, nn.GroupNorm(1, width), nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1)
        )
    )


def _dense(width: int) -> nn.Module:
    grow = nn.Sequential(_conv(width, 8, size=1), _conv(8, 8))
    return nn.Sequential(_Concatenated(nn.Identity(), grow), _conv(width + 8, width, size=1))


def _sequence(width: int, depth: int, block: Callable[[int], nn.Module], classes: int) -> nn.Module:
    """Of 32 positions with 16 numbers."""
    return nn.Sequential(
        nn.Linear(16, width), *(block(width) for _ in range(depth)), _Mean(1), nn.Linear(width, classes)
    )


def _encoder(width: int) -> nn.Module:
    feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return nn.Sequential(_Residual(nn.Sequential(nn.LayerNorm(width), _Attention(width, 4))), _Residual(feed))


def _vit(size: int, classes: int) -> nn.Module:
    width = 32 * size
    patches = nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.Flatten(2), _Permuted())
    return nn.Sequential(patches, *(_encoder(width) for _ in range(3)), _Mean(1), nn.Linear(width, classes))


def _mixer(size: int, classes: int) -> nn.Module:
    width = 32 * size
    patches = nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.Flatten(2), _Permuted())
    return nn.Sequential(patches, *(_MixerBlock(64, width) for _ in range(3)), _Mean(1), nn.Linear(width, classes))


class _Permuted(nn.Module):
    """Channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def _lenet(size: int, classes: int) -> nn.Module:
    width = 6 * size
    return nn.Sequential(
        *(nn.Conv2d(3, width, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(width, 2 * width, 5), nn.Tanh()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(50 * width, 120), nn.Tanh(), nn.Linear(120, classes)),
    )


def _vgg(size: int, classes: int) -> nn.Module:
    width = 16 * size
    layers = [_conv(3, width), nn.MaxPool2d(2), _conv(width, 2 * width), nn.MaxPool2d(2), _conv(2 * width, 4 * width)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * width, 256), nn.Dropout(0.5), nn.Linear(256, classes))


def _temporal(width: int, *, dilation: int) -> nn.Module:
    conv = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
    return _Residual(_Transposed(nn.Sequential(conv, nn.BatchNorm1d(width), nn.ReLU())))


def _volume(size: int, classes: int) -> nn.Module:
    width = 4 * size
    return nn.Sequential(
        *(nn.Conv3d(1, width, 3, padding=1), nn.ReLU(), nn.Conv3d(width, width, 3, 2, 1), nn.BatchNorm3d(width)),
        *(nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(width, classes)),
    )


def _inception(width: int) -> nn.Module:
    part = width // 4
    pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(width, part, 1))
    return _Concatenated(_conv(width, part, size=1), _conv(width, part), _conv(width, part, size=5), pool)


def _images(build: Callable[[int, int], nn.Module]) -> Architecture:
    return Architecture(build, (3, 32, 32))


def _blocks(block: Callable[[int], nn.Module], width: int, depth: int = 3) -> Architecture:
    return _images(lambda size, classes: _stack(width * size, depth, block, classes))


def _sequences(block: Callable[[int], nn.Module], width: int, depth: int = 3) -> Architecture:
    return Architecture(lambda size, classes: _sequence(width * size, depth, block, classes), (32, 16))


def _recurrent(kind: Callable[..., nn.RNNBase], **options: Any) -> Architecture:
    def build(size: int, classes: int) -> nn.Module:
        return _Recurrent(kind(16, 48 * size, batch_first=True, **options), classes)

    return Architecture(build, (32, 16))


def _linear(size: int, classes: int, activation: type[nn.Module]) -> nn.Module:
    width = 256 * size
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3072, width),
        activation(),
        nn.Linear(width, width),
        activation(),
        nn.Linear(width, classes),
    )


def _residual(width: int) -> nn.Module:
    return _Residual(nn.Sequential(_conv(width, width), _conv(width, width)))


def _residual_in_place(width: int) -> nn.Module:
    conv, norm, _ = _conv(width, width)  # the output of a ReLU may not change: its backward needs it
    return _Residual(nn.Sequential(conv, norm), in_place=True)


ARCHITECTURES: Mapping[str, Architecture] = {
    "lenet": _images(_lenet),
    "vgg": _images(_vgg),
    "mlp-relu": _images(lambda size, classes: _linear(size, classes, nn.ReLU)),
    "mlp-gelu": _images(lambda size, classes: _linear(size, classes, nn.GELU)),
    "plain": _blocks(lambda width: _conv(width, width), 16),
    "narrow": _blocks(lambda width: _conv(width, width), 4, 12),
    "wide": _blocks(lambda width: _conv(width, width), 48, 2),
    "depthwise": _blocks(_depthwise, 32),
    "depthwise-deep": _blocks(_depthwise, 16, 10),
    "grouped": _blocks(lambda width: _conv(width, width, groups=4), 32),
    "grouped-1": _blocks(lambda width: _conv(width, width, groups=width // 8, size=5), 32),
    "dilated": _blocks(lambda width: _conv(width, width, dilation=2), 16),
    "dilated-4": _blocks(lambda width: _conv(width, width, dilation=4), 24),
    "large-kernel": _blocks(lambda width: _conv(width, width, size=7), 16),
    "pointwise": _blocks(lambda width: _conv(width, width, size=1), 48, 6),
    "residual": _blocks(_residual, 16),
    "residual-deep": _blocks(_residual, 8, 9),
    "residual-in-place": _blocks(
        lambda width: _Residual(nn.Sequential(*list(_conv(width, width))[:2]), in_place=True), 24
    ),
    "in-place": _images(lambda size, classes: _InPlace(24 * size, classes)),
    "group-norm": _blocks(_group_norm, 24),
    "instance-norm": _blocks(
        lambda width: nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.InstanceNorm2d(width), nn.SiLU()), 16
    ),
    "squeeze": _blocks(lambda width: nn.Sequential(_conv(width, width), _Gated(width)), 24),
    "inverted": _blocks(_inverted, 16),
    "conv-next": _blocks(_conv_next, 24),
    "dense": _blocks(_dense, 16, 4),
    "dense-narrow": _blocks(_dense, 8, 16),
    "inception": _blocks(_inception, 32),
    "shared": _blocks(lambda width: _Repeated(nn.Conv2d(width, width, 3, padding=1), 3), 16, 2),
    "shared-linear": _sequences(lambda width: _Repeated(nn.Linear(width, width), 4), 64, 1),
    "u-net": _images(lambda size, classes: _UNet(12 * size, classes)),
    "volume": Architecture(_volume, (1, 12, 16, 16)),
    "temporal": _sequences(lambda width: _temporal(width, dilation=1), 48),
    "temporal-dilated": _sequences(lambda width: _temporal(width, dilation=4), 64),
    "lstm": _recurrent(nn.LSTM),
    "lstm-2": _recurrent(nn.LSTM, num_layers=2, dropout=0.1),
    "lstm-both-ways": _recurrent(nn.LSTM, bidirectional=True),
    "gru": _recurrent(nn.GRU),
    "gru-2": _recurrent(nn.GRU, num_layers=2),
    "gru-both-ways": _recurrent(nn.GRU, bidirectional=True),
    "rnn": _recurrent(nn.RNN),
    "attention": _sequences(lambda width: _Attention(width, 4), 32),
    "encoder": _sequences(_encoder, 32),
    "vit": _images(_vit),
    "mixer": _images(_mixer),
    "text": Architecture(
        lambda size, classes: nn.Sequential(
            _Tokens(500 * size, 64), _encoder(64), _encoder(64), _Mean(1), nn.Linear(64, classes)
        ),
        (48,),
    ),
    "text-gru": Architecture(
        lambda size, classes: nn.Sequential(
            _Tokens(800, 32), _Recurrent(nn.GRU(32, 32 * size, batch_first=True), classes)
        ),
        (40,),
    ),
}

# of torchvision and timm: small ones of each family; what an installed version does not have is left out
_TORCHVISION = (
    *("mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "resnet18", "mnasnet0_5"),
    *("efficientnet_b0", "regnet_y_400mf", "densenet121", "googlenet"),
)
_TIMM = (
    *("mobilenetv3_small_050", "ghostnet_050", "convnext_atto", "mobilevit_xxs", "efficientnet_lite0", "lcnet_050"),
    *("resnet10t", "tinynet_e", "mixnet_s", "repvgg_a0", "fbnetc_100", "vit_tiny_patch16_224"),
)


def installed() -> tuple[str, ...]:
    """`torchvision:NAME` and `timm:NAME`, as far as they are there."""
    names: list[str] = []
    if importlib.util.find_spec("torchvision") is not None:
        known = set(_torchvision().list_models())
        names += [f"torchvision:{name}" for name in _TORCHVISION if name in known]
    if importlib.util.find_spec("timm") is not None and names:  # it needs torchvision
        known = set(importlib.import_module("timm").list_models())
        names += [f"timm:{name}" for name in _TIMM if name in known]
    return tuple(names)


def named(name: str) -> Architecture:
    """One of ours, or `torchvision:NAME`, `timm:NAME`."""
    package, colon, model = name.partition(":")
    if not colon:
        return ARCHITECTURES[name]
    if package == "torchvision":
        options = {"aux_logits": False, "init_weights": False} if model == "googlenet" else {}
        return Architecture(
            lambda size, classes: _torchvision().get_model(model, weights=None, num_classes=classes, **options),
            (3, 64, 64),
        )
    _torchvision()
    timm = importlib.import_module("timm")
    settings: dict[str, Any] = {"img_size": 64} if model.startswith("vit") else {}
    return Architecture(
        lambda size, classes: timm.create_model(model, pretrained=False, num_classes=classes, **settings), (3, 64, 64)
    )


@functools.cache
def _torchvision() -> ModuleType:
    """Its models; beside a CPU build of torch, the usual wheel names an operator that is not there, and none calls."""
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError:  # operator torchvision::nms does not exist: no model here calls it
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")  # type: ignore[no-untyped-call]
        _KEPT.append(library)  # what it declares ends with it
        return importlib.import_module("torchvision.models")


_KEPT: list[object] = []
