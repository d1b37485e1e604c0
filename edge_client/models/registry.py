"""The built-in models by name. Names, options and input shapes are checked without torch; `build` loads it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edge_client.config.tables import parse_table
from edge_client.errors import InputError, NoSuchNameError
from edge_client.models import library, slicing
from edge_client.models.built_in import FAMILIES, MODELS, BuiltIn
from edge_client.models.options import MAX_ELEMENTS
from edge_client.models.slicing import FULL, SliceSpec

if TYPE_CHECKING:
    from torch import nn

    from edge_client.models.contract import Model
    from edge_client.models.found_units.result import FoundUnits

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


def names() -> list[str]:
    """All built-in models, sorted, with numbers in their order."""
    return sorted(MODELS, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])


def options_type(name: str) -> type:
    """The dataclass of a model's own options; raises `NoSuchNameError`."""
    return _built_in(name).options


def default_input(name: str) -> tuple[int, ...]:
    """The usual shape of a sample for a model; raises `NoSuchNameError`."""
    return _built_in(name).input


def parse_slice(name: str, text: str, *, others: bool = False) -> SliceSpec:
    """The slice of a model that a text names: as `slicing.parse`, or a smaller model of its family; raises as both.

    `others`: any other model may stand in its place.
    """
    if text == name:
        return FULL
    for family in FAMILIES:
        if name in family and text in family:
            return SliceSpec(depths=family[text])
    if text in MODELS:
        if others:
            return SliceSpec(model=text)
        family_names = [other for family in FAMILIES if name in family for other in family]
        raise NoSuchNameError.of(f"slice of {name}", text, family_names)
    return slicing.parse(text)


def validate(name: str, input_shape: Sequence[int], options: Mapping[str, Any]) -> None:
    """Raise `NoSuchNameError` for an unknown model, `InputError` for options or a shape it cannot use."""
    _parse(name, input_shape, options)


def keeps_statistics(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a model has BatchNorms with running statistics; raises as `validate`, but for shapes. Free of torch."""
    parsed: Any = parse_table(_built_in(name).options, options, source=f"model {name!r}")
    return bool(getattr(parsed, "track_running_stats", False))


def build(
    name: str,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    options: Mapping[str, Any],
    spec: SliceSpec = FULL,
    units: FoundUnits | None = None,
) -> Model:
    """The model, or a slice of it, with random weights from torch's global generator; raises as `validate` does.

    `units` are those of a library's model that came with the run.
    """
    from edge_client.models.contract import from_sequential

    if library.is_of_library(name):
        from edge_client.models.user_module import adopt

        module = _of_library(name, input_shape, num_classes, options)
        model = adopt(module, None, input_shape=input_shape, num_classes=num_classes, found=units)
        return model if spec == FULL else slicing.shorten(model, spec)
    return from_sequential(_layers(name, input_shape, num_classes, options, spec), input_shape=input_shape)


def parameter_sizes(
    name: str,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    options: Mapping[str, Any],
    spec: SliceSpec = FULL,
) -> list[int]:
    """Elements of each parameter and buffer that `build` would make, without memory for them; raises as `build`."""
    layers = _empty(name, input_shape, num_classes, options, spec)
    return [tensor.numel() for tensor in (*layers.parameters(), *layers.buffers())]


def skeleton(name: str, *, input_shape: Sequence[int], num_classes: int, options: Mapping[str, Any]) -> Model:
    """The units in order, with shapes but without memory for their values; raises as `build`."""
    from edge_client.models.contract import Model, children_of

    if library.is_of_library(name):
        return build(name, input_shape=input_shape, num_classes=num_classes, options=options)
    layers = _empty(name, input_shape, num_classes, options, FULL)
    return Model(children_of(layers))


def _empty(
    name: str, input_shape: Sequence[int], num_classes: int, options: Mapping[str, Any], spec: SliceSpec
) -> nn.Module:
    import torch

    with torch.device("meta"):  # nothing is run on it: that would load 77 MB of torch's shape functions
        if library.is_of_library(name):
            return _of_library(name, input_shape, num_classes, options)
        return _layers(name, input_shape, num_classes, options, spec)


def _layers(
    name: str, input_shape: Sequence[int], num_classes: int, options: Mapping[str, Any], spec: SliceSpec = FULL
) -> nn.Sequential:
    parsed = _parse(name, input_shape, options)
    if num_classes < 1:
        raise InputError(f"model {name!r} needs at least one class, got {num_classes}; name them in classes")
    if spec.model:
        raise InputError(f"slice {str(spec)!r} is another model, no part of {name!r}")
    return _built_in(name).layers(tuple(input_shape), num_classes, parsed, spec)


def _of_library(name: str, input_shape: Sequence[int], num_classes: int, options: Mapping[str, Any]) -> nn.Module:
    return library.build(name, tuple(input_shape), num_classes, _parse(name, input_shape, options))


def _no_layers(*_: Any) -> nn.Sequential:
    raise AssertionError("a library's model is adopted, not put together from layers")


_OF_LIBRARY = BuiltIn(library.LibraryOptions, library.check, _no_layers, (3, 224, 224))


def _built_in(name: str) -> BuiltIn:
    if library.is_of_library(name):
        return _OF_LIBRARY
    if name not in MODELS:
        raise NoSuchNameError.of("model", name, names())
    return MODELS[name]


def _parse(name: str, input_shape: Sequence[int], options: Mapping[str, Any]) -> Any:
    model = _built_in(name)
    shape = tuple(input_shape)
    if not shape or min(shape) < 1 or math.prod(shape) > MAX_ELEMENTS:
        raise InputError(f"model {name!r}: expected an input shape such as [1, 28, 28], got {list(shape)}")
    typed = {key.replace("_", "-"): value for key, value in options.items()}  # as they stand in files
    parsed: Any = parse_table(model.options, typed, source=f"model {name!r}")
    model.check(name, shape, parsed)
    return parsed
