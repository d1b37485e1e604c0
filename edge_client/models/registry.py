"""The built-in models by name. Names, options and input shapes are checked without torch; `build` loads it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_client.config.tables import parse_table
from edge_client.errors import InputError, NoSuchNameError
from edge_client.models import options as known
from edge_client.models import slicing
from edge_client.models.slicing import FULL, SliceSpec

if TYPE_CHECKING:
    from torch import nn

    from edge_client.models.contract import Model

__all__ = [
    "build",
    "default_input",
    "keeps_statistics",
    "names",
    "options_type",
    "parameter_sizes",
    "parse_slice",
    "skeleton",
    "validate",
]

_Shape = tuple[int, ...]
# input shape, number of classes, options, slice -> units; what makes them imports torch, hence not at the top
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
_NESTED = (_BASIC, _BOTTLENECK, _VIT_S)  # the smaller networks of a family are slices of the larger ones


def _small_cnn(shape: _Shape, num_classes: int, options: known.SmallCnnOptions, cut: SliceSpec) -> nn.Sequential:
    from edge_client.models.small_cnn import small_cnn

    return small_cnn(shape, num_classes, width=options.width, cut=cut)


def _mlp(shape: _Shape, num_classes: int, options: known.MlpOptions, cut: SliceSpec) -> nn.Sequential:
    from edge_client.models.mlp import mlp

    return mlp(shape, num_classes, hidden=options.hidden, cut=cut)


def _har_cnn(shape: _Shape, num_classes: int, options: known.HarCnnOptions, cut: SliceSpec) -> nn.Sequential:
    from edge_client.models.har_cnn import har_cnn

    return har_cnn(shape, num_classes, width=options.width, track_running_stats=options.track_running_stats, cut=cut)


def _preresnet(shape: _Shape, num_classes: int, options: known.PreResNetOptions, cut: SliceSpec) -> nn.Sequential:
    from edge_client.models.preresnet import preresnet

    return preresnet(
        shape,
        num_classes,
        width=options.width,
        shortcut=options.shortcut,
        stem_norm=options.stem_norm,
        track_running_stats=options.track_running_stats,
        cut=cut,
    )


def _resnet(blocks: Sequence[int], *, bottleneck: bool = False) -> _Layers:
    def layers(shape: _Shape, num_classes: int, options: known.ResNetOptions, cut: SliceSpec) -> nn.Sequential:
        from edge_client.models.resnet import resnet

        return resnet(
            shape,
            num_classes,
            blocks=blocks,
            base_width=options.base_width,
            small_stem=options.small_stem,
            bottleneck=bottleneck,
            track_running_stats=options.track_running_stats,
            cut=cut,
        )

    return layers


def _densenet(num_layers: Sequence[int]) -> _Layers:
    def layers(shape: _Shape, num_classes: int, options: known.DenseNetOptions, cut: SliceSpec) -> nn.Sequential:
        from edge_client.models.densenet import densenet

        return densenet(
            shape,
            num_classes,
            layers=num_layers,
            growth=options.growth,
            base_width=options.base_width,
            small_stem=options.small_stem,
            track_running_stats=options.track_running_stats,
            cut=cut,
        )

    return layers


def _transformer(depth: int | None = None) -> _Layers:
    """Of so many blocks, or of as many as an option says."""

    def layers(shape: _Shape, num_classes: int, options: Any, cut: SliceSpec) -> nn.Sequential:
        from edge_client.models.vit import vit

        return vit(
            shape,
            num_classes,
            patch=options.patch,
            width=options.width,
            heads=options.heads,
            depth=options.depth if depth is None else depth,
            cut=cut,
        )

    return layers


@dataclass(frozen=True, slots=True)
class _Entry:
    options: type
    check: Callable[[str, _Shape, Any], None]
    layers: _Layers
    input: _Shape = (3, 32, 32)  # where nobody tells one


_MODELS = {
    "mlp": _Entry(known.MlpOptions, known.check_mlp, _mlp, (1, 28, 28)),
    "small-cnn": _Entry(known.SmallCnnOptions, known.check_small_cnn, _small_cnn, (1, 28, 28)),
    "har-cnn": _Entry(known.HarCnnOptions, known.check_har_cnn, _har_cnn, (9, 128)),
    "har-transformer": _Entry(known.HarTransformerOptions, known.check_har_transformer, _transformer(), (9, 128)),
    "preresnet20": _Entry(known.PreResNetOptions, known.check_preresnet, _preresnet),
    **{name: _Entry(known.ResNetOptions, known.check_resnet, _resnet(blocks)) for name, blocks in _BASIC.items()},
    **{
        name: _Entry(known.ResNetOptions, known.check_resnet, _resnet(blocks, bottleneck=True))
        for name, blocks in _BOTTLENECK.items()
    },
    **{
        name: _Entry(
            known.DenseNet161Options if name == "densenet161" else known.DenseNetOptions,
            known.check_densenet,
            _densenet(num_layers),
        )
        for name, num_layers in _DENSE.items()
    },
    "vit-t-16": _Entry(known.VitTOptions, known.check_vit, _transformer(), (3, 224, 224)),
    **{
        name: _Entry(known.VitSOptions, known.check_vit, _transformer(depth), (3, 224, 224))
        for name, (depth,) in _VIT_S.items()
    },
}


def names() -> list[str]:
    """All built-in models, sorted, with numbers in their order."""
    return sorted(_MODELS, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])


def options_type(name: str) -> type:
    """The dataclass of a model's own options; raises `NoSuchNameError`."""
    return _entry(name).options


def default_input(name: str) -> tuple[int, ...]:
    """A shape of a sample that is usual for a model; raises `NoSuchNameError`."""
    return _entry(name).input


def parse_slice(name: str, text: str, *, others: bool = False) -> SliceSpec:
    """The slice of a model that a text names: as `slicing.parse`, or a smaller model of its family; raises as both.

    `others`: any other model may stand in its place.
    """
    if text == name:
        return FULL
    for family in _NESTED:
        if name in family and text in family:
            return SliceSpec(depths=family[text])
    if text in _MODELS:
        if others:
            return SliceSpec(model=text)
        known_ones = [other for family in _NESTED if name in family for other in family]
        raise NoSuchNameError.of(f"slice of {name}", text, known_ones)
    return slicing.parse(text)


def validate(name: str, input_shape: Sequence[int], options: Mapping[str, Any]) -> None:
    """Raise `NoSuchNameError` for an unknown model, `InputError` for options or a shape it cannot use."""
    _parse(name, input_shape, options)


def keeps_statistics(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a model has BatchNorms with running statistics; raises as `validate`, but for shapes. Free of torch."""
    parsed: Any = parse_table(_entry(name).options, options, source=f"model {name!r}")
    return bool(getattr(parsed, "track_running_stats", False))


def build(
    name: str,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    options: Mapping[str, Any],
    cut: SliceSpec = FULL,
) -> Model:
    """The model, or a slice of it, with random weights from torch's global generator; raises as `validate` does."""
    from edge_client.models.contract import from_sequential

    return from_sequential(_layers(name, input_shape, num_classes, options, cut), input_shape=input_shape)


def parameter_sizes(
    name: str,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    options: Mapping[str, Any],
    cut: SliceSpec = FULL,
) -> list[int]:
    """Elements of each parameter and buffer that `build` would make, without memory for them; raises as `build`."""
    layers = _empty(name, input_shape, num_classes, options, cut)
    return [tensor.numel() for tensor in (*layers.parameters(), *layers.buffers())]


def skeleton(name: str, *, input_shape: Sequence[int], num_classes: int, options: Mapping[str, Any]) -> Model:
    """The units in order, with shapes but without memory for their values; raises as `build`."""
    from edge_client.models.contract import Model, children_of

    return Model(children_of(_empty(name, input_shape, num_classes, options, FULL)))


def _empty(
    name: str, input_shape: Sequence[int], num_classes: int, options: Mapping[str, Any], cut: SliceSpec
) -> nn.Sequential:
    import torch

    with torch.device("meta"):  # nothing is run on it: that would load 77 MB of torch's shape functions
        return _layers(name, input_shape, num_classes, options, cut)


def _layers(
    name: str, input_shape: Sequence[int], num_classes: int, options: Mapping[str, Any], cut: SliceSpec = FULL
) -> nn.Sequential:
    parsed = _parse(name, input_shape, options)
    if num_classes < 1:
        raise InputError(f"model {name!r} needs at least one class, got {num_classes}; name them in classes")
    if cut.model:
        raise InputError(f"slice {str(cut)!r} is another model, no part of {name!r}")
    return _entry(name).layers(tuple(input_shape), num_classes, parsed, cut)


def _entry(name: str) -> _Entry:
    if name not in _MODELS:
        raise NoSuchNameError.of("model", name, names())
    return _MODELS[name]


def _parse(name: str, input_shape: Sequence[int], options: Mapping[str, Any]) -> Any:
    entry = _entry(name)
    shape = tuple(input_shape)
    if not shape or min(shape) < 1 or math.prod(shape) > known.MAX_ELEMENTS:
        raise InputError(f"model {name!r}: expected an input shape such as [1, 28, 28], got {list(shape)}")
    typed = {key.replace("_", "-"): value for key, value in options.items()}  # as they stand in files
    parsed: Any = parse_table(entry.options, typed, source=f"model {name!r}")
    entry.check(name, shape, parsed)
    return parsed
