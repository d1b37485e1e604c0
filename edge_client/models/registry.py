"""The built-in models by name. Names, options and input shapes are checked without torch; `build` loads it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from edge_client.errors import InputError, NoSuchNameError
from edge_client.files import parse_table
from edge_client.records import Between

if TYPE_CHECKING:
    from torch import nn

    from edge_client.models.contract import Model

__all__ = ["MlpOptions", "SmallCnnOptions", "build", "names", "options_type", "parameter_sizes", "validate"]

_MAX_ELEMENTS = 2**28  # of one sample or one weight: 1 GiB of float32; beyond, a number is a typing error


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCnnOptions:
    """Options of `small-cnn`."""

    width: Annotated[int, Between(1, 1024)] = field(
        default=32, metadata={"help": "channels of the first convolution; the second has twice as many"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpOptions:
    """Options of `mlp`."""

    hidden: tuple[Annotated[int, Between(1, 65536)], ...] = field(
        default=(64,), metadata={"help": "widths of the hidden layers, such as [64] or [256, 64]; [] is linear"}
    )


def _small_cnn(input_shape: tuple[int, ...], num_classes: int, options: SmallCnnOptions) -> nn.Sequential:
    from edge_client.models.small_cnn import small_cnn

    return small_cnn(input_shape, num_classes, width=options.width)


def _mlp(input_shape: tuple[int, ...], num_classes: int, options: MlpOptions) -> nn.Sequential:
    from edge_client.models.mlp import mlp

    return mlp(input_shape, num_classes, hidden=options.hidden)


def _check_small_cnn(shape: tuple[int, ...], options: SmallCnnOptions) -> None:
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise InputError(
            f"model 'small-cnn' needs an input of channels, height, width with at least 4x4 pixels, got {list(shape)}"
        )


def _check_mlp(shape: tuple[int, ...], options: MlpOptions) -> None:
    widths = (math.prod(shape), *options.hidden)
    largest = max((a * b for a, b in itertools.pairwise(widths)), default=0)
    if largest > _MAX_ELEMENTS:
        raise InputError(f"model 'mlp': hidden {list(options.hidden)} makes a layer of {largest} weights; narrow it")


@dataclass(frozen=True, slots=True)
class _Entry:
    options: type
    check: Callable[[tuple[int, ...], Any], None]
    layers: Callable[[tuple[int, ...], int, Any], nn.Sequential]  # imports torch, hence not at the top


_MODELS = {
    "mlp": _Entry(MlpOptions, _check_mlp, _mlp),
    "small-cnn": _Entry(SmallCnnOptions, _check_small_cnn, _small_cnn),
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
    if not shape or min(shape) < 1 or math.prod(shape) > _MAX_ELEMENTS:
        raise InputError(f"model {name!r}: expected an input shape such as [1, 28, 28], got {list(shape)}")
    entry = _MODELS[name]
    parsed: Any = parse_table(entry.options, options, source=f"model {name!r}")
    entry.check(shape, parsed)
    return parsed
