"""The options of the built-in models, and which inputs they take: all that is checked of a model without torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from edge_client.errors import InputError
from edge_client.records import Between, Matches

__all__ = [
    "MAX_ELEMENTS",
    "DenseNet161Options",
    "DenseNetOptions",
    "HarCnnOptions",
    "HarTransformerOptions",
    "MlpOptions",
    "PreResNetOptions",
    "ResNetOptions",
    "SmallCnnOptions",
    "VitOptions",
    "VitSOptions",
    "VitTOptions",
    "check_densenet",
    "check_har_cnn",
    "check_har_transformer",
    "check_mlp",
    "check_preresnet",
    "check_resnet",
    "check_small_cnn",
    "check_vit",
]

MAX_ELEMENTS = 2**28  # of one sample or one weight: 1 GiB of float32; beyond, a number is a typing error

_Shape = tuple[int, ...]
_TRACK_HELP = "whether BatchNorm keeps running statistics for tests; otherwise each batch has its own"
_SMALL_STEM = "a 3x3 convolution at full size instead of 7x7 and pooling, for small images"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PreResNetOptions:
    """Options of `preresnet20`."""

    width: Annotated[int, Between(1, 256)] = field(
        default=16, metadata={"help": "channels of the first stage; each further stage has twice as many"}
    )
    shortcut: Annotated[str, Matches(r"conv|pad")] = field(
        default="conv", metadata={"help": "past a block that widens: a 1x1 convolution, or channels of zeros"}
    )
    stem_norm: bool = field(default=False, metadata={"help": "whether a BatchNorm follows the first convolution"})
    track_running_stats: bool = field(default=False, metadata={"help": _TRACK_HELP})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetOptions:
    """Options of `resnet10` to `resnet152`."""

    base_width: Annotated[int, Between(1, 256)] = field(
        default=64, metadata={"help": "channels of the first stage; each further stage has twice as many"}
    )
    small_stem: bool = field(default=False, metadata={"help": _SMALL_STEM})
    track_running_stats: bool = field(default=True, metadata={"help": _TRACK_HELP})


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseNetOptions:
    """Options of `densenet121`, `densenet169` and `densenet201`."""

    growth: Annotated[int, Between(1, 256)] = field(default=32, metadata={"help": "channels that each layer adds"})
    base_width: Annotated[int, Between(1, 256)] = field(default=64, metadata={"help": "channels behind the stem"})
    small_stem: bool = field(default=False, metadata={"help": _SMALL_STEM})
    track_running_stats: bool = field(default=True, metadata={"help": _TRACK_HELP})


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseNet161Options:
    """Options of `densenet161`, which is wider."""

    growth: Annotated[int, Between(1, 256)] = field(default=48, metadata={"help": "channels that each layer adds"})
    base_width: Annotated[int, Between(1, 256)] = field(default=96, metadata={"help": "channels behind the stem"})
    small_stem: bool = field(default=False, metadata={"help": _SMALL_STEM})
    track_running_stats: bool = field(default=True, metadata={"help": _TRACK_HELP})


@dataclass(frozen=True, slots=True, kw_only=True)
class HarCnnOptions:
    """Options of `har-cnn`."""

    width: Annotated[int, Between(1, 1024)] = field(
        default=32, metadata={"help": "channels of the first stage; the second has twice as many"}
    )
    track_running_stats: bool = field(default=True, metadata={"help": _TRACK_HELP})


@dataclass(frozen=True, slots=True, kw_only=True)
class VitTOptions:
    """Options of `vit-t-16`."""

    patch: Annotated[int, Between(1, 256)] = field(default=16, metadata={"help": "height and width of a patch"})
    width: Annotated[int, Between(1, 2048)] = field(default=192, metadata={"help": "features of a token"})
    heads: Annotated[int, Between(1, 64)] = field(default=3, metadata={"help": "attention heads; width is a multiple"})
    depth: Annotated[int, Between(1, 64)] = field(default=12, metadata={"help": "blocks"})


@dataclass(frozen=True, slots=True, kw_only=True)
class VitSOptions:
    """Options of `vit-s-8` to `vit-s-12`, whose names tell the number of blocks."""

    patch: Annotated[int, Between(1, 256)] = field(default=16, metadata={"help": "height and width of a patch"})
    width: Annotated[int, Between(1, 2048)] = field(default=384, metadata={"help": "features of a token"})
    heads: Annotated[int, Between(1, 64)] = field(default=6, metadata={"help": "attention heads; width is a multiple"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HarTransformerOptions:
    """Options of `har-transformer`."""

    patch: Annotated[int, Between(1, 4096)] = field(default=8, metadata={"help": "values of time in one token"})
    width: Annotated[int, Between(1, 2048)] = field(default=64, metadata={"help": "features of a token"})
    heads: Annotated[int, Between(1, 64)] = field(default=4, metadata={"help": "attention heads; width is a multiple"})
    depth: Annotated[int, Between(1, 64)] = field(default=3, metadata={"help": "blocks"})


VitOptions = VitTOptions | VitSOptions


def check_small_cnn(name: str, shape: _Shape, options: SmallCnnOptions) -> None:
    """Raise `InputError` for a shape that `small-cnn` cannot use."""
    _check_image(name, shape, 4)


def check_mlp(name: str, shape: _Shape, options: MlpOptions) -> None:
    """Raise `InputError` for widths that make a huge layer."""
    widths = (math.prod(shape), *options.hidden)
    largest = max((a * b for a, b in itertools.pairwise(widths)), default=0)
    if largest > MAX_ELEMENTS:
        raise InputError(f"model {name!r}: hidden {list(options.hidden)} makes a layer of {largest} weights; narrow it")


def check_preresnet(name: str, shape: _Shape, options: PreResNetOptions) -> None:
    """Raise `InputError` for a shape that is no image of 8x8 or more: the last stage needs more than one pixel.

    Without running statistics a BatchNorm could not judge a single sample there.
    """
    _check_image(name, shape, 8)
    _check_weight(name, "the first convolution", shape[0] * 9 * options.width)


def check_resnet(name: str, shape: _Shape, options: ResNetOptions) -> None:
    """Raise `InputError` for a shape that is no image of 8x8 or more, or too small for statistics of a batch."""
    _check_image(name, shape, 8)
    _check_statistics(name, shape, options)
    _check_weight(name, "the first convolution", shape[0] * (9 if options.small_stem else 49) * options.base_width)


def check_densenet(name: str, shape: _Shape, options: DenseNetOptions | DenseNet161Options) -> None:
    """Raise `InputError` for a shape that is no image of 8x8 or more, or too small for statistics of a batch."""
    _check_image(name, shape, 8)
    _check_statistics(name, shape, options)
    _check_weight(name, "the first convolution", shape[0] * (9 if options.small_stem else 49) * options.base_width)


def check_har_cnn(name: str, shape: _Shape, options: HarCnnOptions) -> None:
    """Raise `InputError` for a shape that is no window of 8 values or more."""
    _check_window(name, shape, 8)
    _check_weight(name, "the first convolution", shape[0] * 5 * options.width)


def check_har_transformer(name: str, shape: _Shape, options: HarTransformerOptions) -> None:
    """Raise `InputError` unless patches tile the window and heads share the width."""
    _check_window(name, shape, 1)
    _check_tokens(name, shape, "a length", "cut the windows to another length", options)


def check_vit(name: str, shape: _Shape, options: VitOptions) -> None:
    """Raise `InputError` unless patches tile the image and heads share the width."""
    _check_image(name, shape, 1)
    _check_tokens(name, shape, "height and width", "resize the images", options)


def _check_tokens(name: str, shape: _Shape, sides: str, fix: str, options: VitOptions | HarTransformerOptions) -> None:
    patch = options.patch
    if any(side % patch for side in shape[1:]):
        raise InputError(
            f"model {name!r}: expected {sides} in multiples of patch = {patch}, got {list(shape)}; {fix}, or set patch"
        )
    if options.width % options.heads:
        raise InputError(
            f"model {name!r}: expected a width in multiples of heads = {options.heads}, got {options.width}"
        )
    _check_weight(name, "the embedding of patches", shape[0] * patch ** (len(shape) - 1) * options.width)
    tokens = 1 + math.prod(side // patch for side in shape[1:])
    _check_weight(name, f"the table of {tokens} positions", tokens * options.width)


def _check_image(name: str, shape: Sequence[int], smallest: int) -> None:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise InputError(
            f"model {name!r} needs an input of channels, height, width with at least {smallest}x{smallest} pixels, "
            f"got {list(shape)}"
        )


def _check_statistics(
    name: str, shape: Sequence[int], options: ResNetOptions | DenseNetOptions | DenseNet161Options
) -> None:
    """Without running statistics a single sample must have more than one pixel in the last stage, to be judged."""
    shrinks = 8 if options.small_stem else 32
    if not options.track_running_stats and max(shape[1:]) <= shrinks:
        stem = "" if options.small_stem or max(shape[1:]) <= 8 else "set small-stem = true, "
        raise InputError(
            f"model {name!r}: track-running-stats = false needs images of more than {shrinks}x{shrinks} pixels, got "
            f"{list(shape)}: the last stage has one pixel of each, of which there are no statistics; {stem}"
            f"take larger images, or preresnet20"
        )


def _check_window(name: str, shape: Sequence[int], shortest: int) -> None:
    if len(shape) != 2 or shape[1] < shortest:
        raise InputError(
            f"model {name!r} needs an input of channels, length with at least {shortest} values, got {list(shape)}"
        )


def _check_weight(name: str, what: str, count: int) -> None:
    if count > MAX_ELEMENTS:
        raise InputError(f"model {name!r}: {what} would have {count} weights, expected at most {MAX_ELEMENTS}")
