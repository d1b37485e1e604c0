"""The built-in models by name. Names, options and input shapes are checked without torch; `build` loads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_client.errors import InputError, NoSuchNameError
from edge_client.files import parse_table
from edge_client.models import options as known

if TYPE_CHECKING:
    from torch import nn

    from edge_client.models.contract import Model

__all__ = ["build", "names", "options_type", "parameter_sizes", "validate"]

# input shape, number of classes, options -> units; what makes them imports torch, hence not at the top
_Layers = Callable[[tuple[int, ...], int, Any], "nn.Sequential"]

_RESNET_BLOCKS = {  # per stage
    "resnet10": (1, 1, 1, 1),
    "resnet14": (1, 1, 2, 2),
    "resnet18": (2, 2, 2, 2),
    "resnet22": (2, 2, 3, 3),
    "resnet26": (3, 3, 3, 3),
    "resnet34": (3, 4, 6, 3),
}
_VIT_S_DEPTHS = (8, 9, 10, 11, 12)


def _small_cnn(input_shape: tuple[int, ...], num_classes: int, options: known.SmallCnnOptions) -> nn.Sequential:
    from edge_client.models.small_cnn import small_cnn

    return small_cnn(input_shape, num_classes, width=options.width)


def _mlp(input_shape: tuple[int, ...], num_classes: int, options: known.MlpOptions) -> nn.Sequential:
    from edge_client.models.mlp import mlp

    return mlp(input_shape, num_classes, hidden=options.hidden)


def _preresnet(input_shape: tuple[int, ...], num_classes: int, options: known.PreResNetOptions) -> nn.Sequential:
    from edge_client.models.preresnet import preresnet

    return preresnet(
        input_shape,
        num_classes,
        width=options.width,
        shortcut=options.shortcut,
        stem_norm=options.stem_norm,
        track_running_stats=options.track_running_stats,
    )


def _resnet(blocks: tuple[int, ...]) -> _Layers:
    def layers(input_shape: tuple[int, ...], num_classes: int, options: known.ResNetOptions) -> nn.Sequential:
        from edge_client.models.resnet import resnet

        return resnet(
            input_shape,
            num_classes,
            blocks=blocks,
            base_width=options.base_width,
            small_stem=options.small_stem,
        )

    return layers


def _vit_t(input_shape: tuple[int, ...], num_classes: int, options: known.VitTOptions) -> nn.Sequential:
    return _vit(options.depth)(input_shape, num_classes, options)


def _vit(depth: int) -> _Layers:
    def layers(input_shape: tuple[int, ...], num_classes: int, options: known.VitOptions) -> nn.Sequential:
        from edge_client.models.vit import vit

        return vit(
            input_shape,
            num_classes,
            patch=options.patch,
            width=options.width,
            heads=options.heads,
            depth=depth,
        )

    return layers


@dataclass(frozen=True, slots=True)
class _Entry:
    options: type
    check: Callable[[str, tuple[int, ...], Any], None]
    layers: _Layers


_MODELS = {
    "mlp": _Entry(known.MlpOptions, known.check_mlp, _mlp),
    "small-cnn": _Entry(known.SmallCnnOptions, known.check_small_cnn, _small_cnn),
    "preresnet20": _Entry(known.PreResNetOptions, known.check_preresnet, _preresnet),
    "vit-t-16": _Entry(known.VitTOptions, known.check_vit, _vit_t),
    **{
        name: _Entry(known.ResNetOptions, known.check_resnet, _resnet(blocks))
        for name, blocks in _RESNET_BLOCKS.items()
    },
    **{f"vit-s-{depth}": _Entry(known.VitSOptions, known.check_vit, _vit(depth)) for depth in _VIT_S_DEPTHS},
}


def names() -> list[str]:
    """All built-in models, sorted."""
    return sorted(_MODELS)


def options_type(name: str) -> type:
    """The dataclass of a model's own options; raises `NoSuchNameError`."""
    if name not in _MODELS:
        raise NoSuchNameError.of("model", name, names())
    return _MODELS[name].options


def validate(name: str, input_shape: Sequence[int], options: Mapping[str, Any]) -> None:
    """Raise `NoSuchNameError` for an unknown model, `InputError` for options or a shape it cannot use."""
    _parse(name, input_shape, options)


def build(name: str, *, input_shape: Sequence[int], num_classes: int, options: Mapping[str, Any]) -> Model:
    """The model with random weights from torch's global generator; raises as `validate` does."""
    from edge_client.models.contract import from_sequential

    return from_sequential(_layers(name, input_shape, num_classes, options), input_shape=input_shape)


def parameter_sizes(
    name: str, *, input_shape: Sequence[int], num_classes: int, options: Mapping[str, Any]
) -> list[int]:
    """Elements of each parameter and buffer that `build` would make, without memory for them; raises as `build`."""
    import torch

    with torch.device("meta"):  # nothing is run on it: that would load 77 MB of torch's shape functions
        layers = _layers(name, input_shape, num_classes, options)
    return [tensor.numel() for tensor in (*layers.parameters(), *layers.buffers())]


def _layers(name: str, input_shape: Sequence[int], num_classes: int, options: Mapping[str, Any]) -> nn.Sequential:
    parsed = _parse(name, input_shape, options)
    if num_classes < 1:
        raise InputError(f"model {name!r} needs at least one class, got {num_classes}; name them in classes")
    return _MODELS[name].layers(tuple(input_shape), num_classes, parsed)


def _parse(name: str, input_shape: Sequence[int], options: Mapping[str, Any]) -> Any:
    if name not in _MODELS:
        raise NoSuchNameError.of("model", name, names())
    shape = tuple(input_shape)
    if not shape or min(shape) < 1 or math.prod(shape) > known.MAX_ELEMENTS:
        raise InputError(f"model {name!r}: expected an input shape such as [1, 28, 28], got {list(shape)}")
    entry = _MODELS[name]
    parsed: Any = parse_table(entry.options, options, source=f"model {name!r}")
    entry.check(name, shape, parsed)
    return parsed
