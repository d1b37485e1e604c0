"""Smaller models inside a model: fewer blocks per stage, the first blocks only, a part of the channels.

    full                        all of it
    depth:1.1.2.2               the first 1, 1, 2 and 2 blocks of its stages, with stem and head
    layers:8                    the first 8 blocks of the whole network (blocks of equal width, such as a transformer's)
    exit:8                      the first 8 blocks with a head of their own, wherever they end (ScaleFL)
    width:1/4  width:0.25       the first quarter of the channels of every layer, rounded up
    width:1/4:o17               as many, beginning at channel 17 and going on at 0 behind the last one (FedRolex)
    depth:1.1.2.2-width:1/2     both
    model:densenet121           no part of it, but another model in its place (`RunFile.section` tells which)

A slice is an index map into the full model: `index_map` tells for each of its tensors which elements of the full tensor
it has, `take` cuts them out, and `params.coverage_mean` puts them back. Names stay those of the full model. Built-in
models are built as slices by the registry, which never makes the full one; `shorten` cuts any other model.

Which axes of a tensor are channels is said by the architecture (`axes`). The class axis and the channels of the input
are never sliced, and channels that are added to each other lie at the same indices, since those follow from the number
of channels alone.
Does not cover: what a method does with a slice (HeteroFL's scaler, ScaleFL's exits). Read without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from edge_client.errors import InputError
from edge_client.models.axes import CHANNELS, WHOLE, Axes, Axis

if TYPE_CHECKING:
    from torch import Tensor

    from edge_client.models.contract import Model, Unit
    from edge_client.params import IndexMap

__all__ = [
    "FULL",
    "SliceSpec",
    "index_map",
    "parse",
    "place_of",
    "shorten",
    "take",
    "take_tensor",
    "units_of_slice",
]


_PARTS = (
    re.compile(r"depth:(?P<depths>\d{1,4}(?:\.\d{1,4})*)"),
    re.compile(r"layers:(?P<layers>\d{1,4})"),
    re.compile(r"exit:(?P<exit>\d{1,4})"),
    re.compile(r"width:(?P<width>\d{1,6}/0*[1-9]\d{0,5}|\d(?:\.\d{1,6})?)(?::o(?P<offset>\d{1,9}))?"),
)
_ANOTHER = re.compile(r"model:([A-Za-z0-9_-]{1,58})")
_FORMS = "full, depth:1.1.2.2, layers:8, exit:8, width:1/4, width:1/4:o17, depth:1.1.2.2-width:1/2, or a model's name"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSpec:
    """Which part of a model; what an architecture asks while it is built."""

    depths: tuple[int, ...] | None = None  # blocks per stage
    layers: int | None = None  # blocks in all
    exit: int | None = None  # blocks in all, and a head for what the last of them puts out
    width: Fraction = Fraction(1)
    offset: int = 0  # the first channel
    model: str = ""  # another model instead, all of it

    def __post_init__(self) -> None:
        if not 0 < self.width <= 1 or self.offset < 0:
            raise ValueError(f"expected a width above 0 and up to 1 and an offset of 0 or more, got {self!r}")
        if sum(blocks is not None for blocks in (self.depths, self.layers, self.exit)) > 1:
            raise ValueError(f"expected blocks per stage or blocks in all, got both: {self!r}")

    def __str__(self) -> str:
        """The short form, which `parse` takes."""
        if self.model:
            return f"model:{self.model}"
        parts = [] if self.depths is None else [f"depth:{'.'.join(map(str, self.depths))}"]
        parts += [] if self.layers is None else [f"layers:{self.layers}"]
        parts += [] if self.exit is None else [f"exit:{self.exit}"]
        parts += [f"width:{self.width}" + (f":o{self.offset}" if self.offset else "")] if self.narrows else []
        return "-".join(parts) or "full"

    @property
    def narrows(self) -> bool:
        """Whether channels are left out, or in another order."""
        return self.width != 1 or self.offset != 0

    def channels(self, count: int) -> int:
        """How many of so many channels; an exact fraction, as 0.55 of 20 would be 12 in floats."""
        return math.ceil(self.width * count)

    def blocks(self, full: Sequence[int], least: Sequence[int], *, exits: bool = False) -> tuple[int, ...]:
        """Blocks in each stage of a model that has `full` of them and cannot do without the first `least`.

        `exits`: it can have a head behind any block.
        """
        if self.exit is not None:
            return self._until_exit(full, exits=exits)
        blocks = tuple(full) if self.depths is None else self.depths
        if self.layers is not None:
            blocks = tuple(min(max(self.layers - sum(full[:stage]), 0), count) for stage, count in enumerate(full))
        expected = ", ".join(str(b) if a == b else f"{a} to {b}" for a, b in zip(least, full, strict=True))
        too_many = (self.layers or 0) > sum(full)
        if tuple(least) == tuple(full) and (too_many or blocks != tuple(full)):
            raise InputError(
                f"slice {str(self)!r}: this model has no blocks that can be left out; use slices of width, "
                "or another model (mlp, a resnet or a vit)"
            )
        if too_many or len(blocks) != len(full):
            raise InputError(f"slice {str(self)!r}: expected blocks for {len(full)} stages, {expected or 'none'}")
        short_stages = [stage for stage, (a, count) in enumerate(zip(least, blocks, strict=True), start=1) if count < a]
        if self.layers is not None and short_stages:
            deep = ".".join(str(max(a, count)) for a, count in zip(least, blocks, strict=True))
            raise InputError(
                f"slice {str(self)!r}: the first {self.layers} blocks lack stage {short_stages[0]}, without which its "
                f"head does not fit; use slices of depth, such as depth:{deep}, or a model of equal blocks (a vit)"
            )
        if not all(a <= count <= b for a, count, b in zip(least, blocks, full, strict=True)):
            raise InputError(f"slice {str(self)!r}: expected {expected} blocks in the stages, got {_joined(blocks)}")
        return blocks

    def _until_exit(self, full: Sequence[int], *, exits: bool) -> tuple[int, ...]:
        assert self.exit is not None
        if not exits:
            raise InputError(f"slice {str(self)!r}: this model has no exits; use another (mlp, a resnet or a vit)")
        if not 1 <= self.exit <= sum(full):
            raise InputError(f"slice {str(self)!r}: expected an exit behind one of {sum(full)} blocks")
        return tuple(min(max(self.exit - sum(full[:stage]), 0), count) for stage, count in enumerate(full))


FULL = SliceSpec()


def parse(text: str) -> SliceSpec:
    """The slice that a short text names; raises `InputError`."""
    if (another := _ANOTHER.fullmatch(text)) is not None:
        return SliceSpec(model=another[1])
    fields: dict[str, str] = {}
    for part in text.split("-") if text != "full" else []:
        part_match = next((match for pattern in _PARTS if (match := pattern.fullmatch(part))), None)
        if part_match is None or "width" in fields or (fields and "width" not in part_match.groupdict()):
            raise InputError(f"slice {text[:80]!r}: expected {_FORMS}")
        fields |= {name: value for name, value in part_match.groupdict().items() if value is not None}
    width = Fraction(fields.get("width", "1"))
    if not 0 < width <= 1:
        raise InputError(f"slice {text!r}: expected a width above 0 and up to 1, got {fields['width']}")
    return SliceSpec(
        depths=tuple(int(count) for count in fields["depths"].split(".")) if "depths" in fields else None,
        layers=int(fields["layers"]) if "layers" in fields else None,
        exit=int(fields["exit"]) if "exit" in fields else None,
        width=width,
        offset=int(fields.get("offset", "0")),
    )


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def index_map(model: Model, spec: SliceSpec, *, part: int = 0) -> dict[str, IndexMap | None]:
    """For each parameter and buffer of the slice its indices in the full model, one vector per axis; None: all of it.

    `part`: of the slices of this width that lie side by side, another than the first. Raises `InputError` if the model
    has no such slice.
    """
    units = units_of_slice(model, spec)
    tensors = {name for unit in units for name in (*unit.parameters, *unit.buffers)}
    state: Mapping[str, Tensor] = model.state_dict()
    if not spec.narrows:
        return {name: None for name in state if name in tensors}
    axes = _channel_axes(model, spec)
    memory: dict[tuple[Axis, int], list[int]] = {}
    return {
        name: _place(tensor, axes.get(name, (CHANNELS, CHANNELS)), spec, memory, part)
        for name, tensor in state.items()
        if name in tensors
    }


def _channel_axes(model: Model, spec: SliceSpec) -> Axes:
    if model.channel_axes is None:
        raise InputError(f"slice {str(spec)!r}: this model does not tell its channels; use a slice of its depth")
    return model.channel_axes


def units_of_slice(model: Model, spec: SliceSpec) -> list[Unit]:
    """The units of a slice: a block may only be missing if its output has the shape of its input."""
    if spec.model:
        raise InputError(f"slice {str(spec)!r} is another model, no part of this one")
    stages = sorted({unit.stage for unit in model.units if unit.kind == "block"})
    members = [[unit for unit in model.units if unit.kind == "block" and unit.stage == stage] for stage in stages]
    least = [
        max((number for number, unit in enumerate(blocks, start=1) if unit.in_shape != unit.out_shape), default=0)
        for blocks in members
    ]
    counts = dict(zip(stages, spec.blocks([len(blocks) for blocks in members], least, exits=True), strict=True))
    return [unit for unit in model.units if unit.kind != "block" or unit.index < counts[unit.stage]]


def place_of(tensor: Tensor, axes: Sequence[Axis | None], spec: SliceSpec) -> IndexMap | None:
    """The indices of a slice of one tensor with these axes; None: all of it."""
    return _place(tensor, axes, spec, {}) if spec.narrows else None


def _place(
    tensor: Tensor,
    axes: Sequence[Axis | None],
    spec: SliceSpec,
    memory: dict[tuple[Axis, int], list[int]],
    part: int = 0,
) -> IndexMap | None:
    import torch

    named = [axes[number] if number < len(axes) else WHOLE for number in range(tensor.ndim)]
    if all(axis is WHOLE for axis in named):
        return None
    return tuple(
        torch.tensor(range(size) if axis is WHOLE else _indices(axis, size, spec, memory, part), dtype=torch.int64)
        for axis, size in zip(named, tensor.shape, strict=True)
    )


def _indices(axis: Axis, size: int, spec: SliceSpec, memory: dict[tuple[Axis, int], list[int]], part: int) -> list[int]:
    if (axis, size) in memory:
        return memory[axis, size]
    groups = axis.groups or (size // axis.repeat,)
    if sum(groups) * axis.repeat != size:
        raise ValueError(f"expected an axis of {groups} x {axis.repeat} elements, the tensor has {size}")
    elements: list[int] = []
    start = 0
    for count in groups:
        first = spec.offset + part * spec.channels(count)
        channels = [start + (first + number) % count for number in range(spec.channels(count))]
        elements += [channel * axis.repeat + part for channel in channels for part in range(axis.repeat)]
        start += count
    memory[axis, size] = elements
    return elements


def take(state: Mapping[str, Tensor], places: Mapping[str, IndexMap | None]) -> dict[str, Tensor]:
    """The tensors of a slice out of those of the full model."""
    return {name: take_tensor(state[name], place) for name, place in places.items()}


def take_tensor(tensor: Tensor, place: IndexMap | None) -> Tensor:
    """The elements of one tensor at the indices; None: the tensor itself."""
    for axis, indices in enumerate(place or ()):
        tensor = tensor.index_select(axis, indices)
    return tensor


def shorten(model: Model, spec: SliceSpec) -> Model:
    """The model without the blocks that a depth slice leaves out; takes them out of `model` itself."""
    from edge_client.models.contract import describe

    if spec.narrows:
        raise InputError(f"slice {str(spec)!r}: only built-in models have slices of their width; use depth or layers")
    if spec.exit is not None:
        raise InputError(f"slice {str(spec)!r}: only built-in models have exits; use depth or layers")
    units = units_of_slice(model, spec)
    shape, was_training = model.input_shape, model.training
    short = model.keep_units([unit.name for unit in units])
    stages = [unit.stage for unit in units]
    return describe(short, input_shape=shape, stages=stages).train(was_training)
