"""The built-in models: what options each has, what it checks, and what builds its layers. Read without torch.

Does not cover: what is asked about a model by its name (`registry`), the options themselves (`options`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_client.models.options import (
    DenseNet161Options,
    DenseNetOptions,
    HarCnnOptions,
    HarTransformerOptions,
    MlpOptions,
    PreResNetOptions,
    ResNetOptions,
    SmallCnnOptions,
    VitSOptions,
    VitTOptions,
    check_densenet,
    check_har_cnn,
    check_har_transformer,
    check_mlp,
    check_preresnet,
    check_resnet,
    check_small_cnn,
    check_vit,
)
from edge_client.models.slicing import SliceSpec

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FAMILIES", "MODELS", "BuiltIn"]

_Shape = tuple[int, ...]
# input shape, number of classes, options, slice -> units; the builders import torch when they are called
_Layers = Callable[[_Shape, int, Any, SliceSpec], "nn.Sequential"]

_BASIC = {  # blocks per stage
    "resnet10": (1, 1, 1, 1),
    "resnet14": (1, 1, 2, 2),
    "resnet18": (2, 2, 2, 2),
    "resnet22": (2, 2, 3, 3),
    "resnet26": (3, 3, 3, 3),
    "resnet34": (3, 4, 6, 3),
}
_BOTTLENECK = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}
_DENSE = {  # layers per stage
    "densenet121": (6, 12, 24, 16),
    "densenet161": (6, 12, 36, 24),
    "densenet169": (6, 12, 32, 32),
    "densenet201": (6, 12, 48, 32),
}
_VIT_S = {f"vit-s-{depth}": (depth,) for depth in (8, 9, 10, 11, 12)}
# the smaller networks of a family are slices of the larger ones
FAMILIES: tuple[Mapping[str, tuple[int, ...]], ...] = (_BASIC, _BOTTLENECK, _VIT_S)


def _small_cnn(shape: _Shape, num_classes: int, options: SmallCnnOptions, spec: SliceSpec) -> nn.Sequential:
    from edge_client.models.small_cnn import small_cnn

    return small_cnn(shape, num_classes, width=options.width, spec=spec)


def _mlp(shape: _Shape, num_classes: int, options: MlpOptions, spec: SliceSpec) -> nn.Sequential:
    from edge_client.models.mlp import mlp

    return mlp(shape, num_classes, hidden=options.hidden, spec=spec)


def _har_cnn(shape: _Shape, num_classes: int, options: HarCnnOptions, spec: SliceSpec) -> nn.Sequential:
    from edge_client.models.har_cnn import har_cnn

    return har_cnn(shape, num_classes, width=options.width, track_running_stats=options.track_running_stats, spec=spec)


def _preresnet(shape: _Shape, num_classes: int, options: PreResNetOptions, spec: SliceSpec) -> nn.Sequential:
    from edge_client.models.preresnet import preresnet

    return preresnet(
        shape,
        num_classes,
        width=options.width,
        shortcut=options.shortcut,
        stem_norm=options.stem_norm,
        track_running_stats=options.track_running_stats,
        spec=spec,
    )


def _resnet(blocks: Sequence[int], *, bottleneck: bool = False) -> _Layers:
    def layers(shape: _Shape, num_classes: int, options: ResNetOptions, spec: SliceSpec) -> nn.Sequential:
        from edge_client.models.resnet import resnet

        return resnet(
            shape,
            num_classes,
            blocks=blocks,
            base_width=options.base_width,
            small_stem=options.small_stem,
            bottleneck=bottleneck,
            track_running_stats=options.track_running_stats,
            spec=spec,
        )

    return layers


def _densenet(num_layers: Sequence[int]) -> _Layers:
    def layers(shape: _Shape, num_classes: int, options: DenseNetOptions, spec: SliceSpec) -> nn.Sequential:
        from edge_client.models.densenet import densenet

        return densenet(
            shape,
            num_classes,
            layers=num_layers,
            growth=options.growth,
            base_width=options.base_width,
            small_stem=options.small_stem,
            track_running_stats=options.track_running_stats,
            spec=spec,
        )

    return layers


def _transformer(depth: int | None = None) -> _Layers:
    """Of so many blocks, or of as many as an option says."""

    def layers(shape: _Shape, num_classes: int, options: Any, spec: SliceSpec) -> nn.Sequential:
        from edge_client.models.vit import vit

        return vit(
            shape,
            num_classes,
            patch=options.patch,
            width=options.width,
            heads=options.heads,
            depth=options.depth if depth is None else depth,
            spec=spec,
        )

    return layers


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model of the table."""

    options: type
    check: Callable[[str, _Shape, Any], None]
    layers: _Layers
    input: _Shape = (3, 32, 32)  # of one sample, unless a run says it


MODELS: Mapping[str, BuiltIn] = {
    "mlp": BuiltIn(MlpOptions, check_mlp, _mlp, (1, 28, 28)),
    "small-cnn": BuiltIn(SmallCnnOptions, check_small_cnn, _small_cnn, (1, 28, 28)),
    "har-cnn": BuiltIn(HarCnnOptions, check_har_cnn, _har_cnn, (9, 128)),
    "har-transformer": BuiltIn(HarTransformerOptions, check_har_transformer, _transformer(), (9, 128)),
    "preresnet20": BuiltIn(PreResNetOptions, check_preresnet, _preresnet),
    **{name: BuiltIn(ResNetOptions, check_resnet, _resnet(blocks)) for name, blocks in _BASIC.items()},
    **{
        name: BuiltIn(ResNetOptions, check_resnet, _resnet(blocks, bottleneck=True))
        for name, blocks in _BOTTLENECK.items()
    },
    **{
        name: BuiltIn(
            DenseNet161Options if name == "densenet161" else DenseNetOptions,
            check_densenet,
            _densenet(num_layers),
        )
        for name, num_layers in _DENSE.items()
    },
    "vit-t-16": BuiltIn(VitTOptions, check_vit, _transformer(), (3, 224, 224)),
    **{name: BuiltIn(VitSOptions, check_vit, _transformer(depth), (3, 224, 224)) for name, (depth,) in _VIT_S.items()},
}
