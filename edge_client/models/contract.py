"""What every model shows of itself: ordered units, named taps, and running a part of it.

    forward(x)  ==  forward_from(units[k + 1].name, forward_to(units[k].name, x))    for every k

Methods and planners ask the model; none looks at its name or class. An `nn.Sequential` gets the contract for free, any
other module by naming its units in order (`user_module` checks that they are the whole model). A `Staged` sequence also
tells the stages of its units, taps inside of them, and which axes of its tensors are channels.
Does not cover: slices of depth or width (`slicing`); they are models by themselves and change nothing here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from edge_client.errors import NoSuchNameError
from edge_client.models.axes import Axes
from edge_client.models.owners import Owner, owners_of
from edge_client.models.recompute import Fusible, run_unit

__all__ = ["Model", "Staged", "Unit", "children_of", "count_outputs", "describe", "from_sequential"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The smallest piece of a model that can be trained by itself."""

    name: str
    kind: str  # stem | block | head
    stage: int  # 0: stem; blocks of equal resolution share a stage; the head comes after the last
    index: int  # position inside its stage
    parameters: tuple[str, ...]  # names in the whole model
    buffers: tuple[str, ...]  # those that travel, such as the running statistics of a BatchNorm
    in_shape: tuple[int, ...]  # without the batch axis
    out_shape: tuple[int, ...]
    num_activations: int  # elements that all layers of the unit put out for one sample
    min_batch: int  # samples to train on at least: 2 where a BatchNorm gets one value per channel, which it refuses


class Model(nn.Module):
    """Units that run one after another; `taps` maps a name to the module, a unit or part of one, that puts it out."""

    units: tuple[Unit, ...]
    taps: Mapping[str, str]
    input_shape: tuple[int, ...]
    channel_axes: Axes | None = None  # tensors whose axes are not simply channels (`slicing`); None: unknown
    anchor_names: Mapping[str, str] | None = None  # weight -> anchor, where the architecture says so (`anchors`)

    def __init__(self, layers: Mapping[str, nn.Module], order: Sequence[str] | None = None) -> None:
        """`order` names the units, as dotted names below `layers`; without it every layer is one."""
        super().__init__()
        if not layers:
            raise ValueError("expected a model of at least one unit, got none")
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._begin(tuple(layers if order is None else order))

    def _begin(self, order: tuple[str, ...]) -> None:
        self._order = order
        self._recompute: str | None = None
        self._overwriting: frozenset[str] = frozenset()  # units that change their input in place, as `describe` saw
        self._watched: dict[str, Callable[[Tensor], None]] = {}

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the units."""
        return self._order

    @property
    def min_batch(self) -> int:
        """Samples that one training pass needs at least."""
        return max(unit.min_batch for unit in self.units)

    @property
    def recompute(self) -> str | None:
        """What is made again in backward instead of being kept, of `recompute_kinds`; the result stays the same."""
        return self._recompute

    @recompute.setter
    def recompute(self, kind: str | None) -> None:
        if kind is not None and kind not in self.recompute_kinds:
            known = ", ".join(repr(known) for known in self.recompute_kinds)
            raise ValueError(f"expected recompute of None, {known} for this model, got {kind!r}")
        for part in self._fusible():
            part.fused = kind is not None  # of units that run again, too: their second pass keeps less
        self._recompute = kind

    @property
    def recompute_kinds(self) -> tuple[str, ...]:
        """The kinds that `recompute` may be set to; `models.recompute` tells what they are."""
        return ("fused", "units") if self._fusible() else ("units",)

    def unit(self, name: str) -> nn.Module:
        """A unit as a module."""
        return self.get_submodule(name)

    def tensors_of_unit(self, name: str) -> tuple[list[str], list[str]]:
        """Names, in the whole model, of a unit's parameters, and of its buffers that travel."""
        module = self.get_submodule(name)
        parameters = dict(module.named_parameters())
        buffers = [f"{name}.{tensor}" for tensor in module.state_dict() if tensor not in parameters]
        return [f"{name}.{parameter}" for parameter in parameters], buffers

    def owners_of_unit(self, name: str) -> Iterator[Owner]:
        """Where a unit's parameters and buffers lie."""
        return owners_of(self.get_submodule(name), name)

    def keep_units(self, names: Sequence[str]) -> Model:
        """The model with these units only, still to be described; the others are taken out of it."""
        for unit in self._order:
            if unit not in names:
                parent, _, leaf = unit.rpartition(".")
                delattr(self.get_submodule(parent), leaf)
        return Model(children_of(self), names)

    def _fusible(self) -> list[Fusible]:
        return [part for part in self.modules() if isinstance(part, Fusible)]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        return self.run_units(self._order, x)

    def forward_to(self, unit: str, x: Tensor) -> Tensor:
        """Output of `unit` for an input of the model."""
        return self.run_units(self._order[: self._position(unit) + 1], x)

    def forward_from(self, unit: str, x: Tensor) -> Tensor:
        """Logits for an input of `unit`."""
        return self.run_units(self._order[self._position(unit) :], x)

    def run_units(self, names: Sequence[str], x: Tensor) -> Tensor:
        """Output of these consecutive units for an input of the first."""
        for name in names:
            unit = self.unit(name)
            # backward begins at the last unit: what that keeps is needed at once
            again = self._recompute == "units" and name != self._order[-1]
            x = run_unit(name, unit, x, overwrites=name in self._overwriting) if again else unit(x)
            if name in self._watched:
                self._watched[name](x.detach().clone() if self._next_overwrites(name) else x.detach())
        return x

    @contextmanager
    def watching(self, units: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
        """Each of these gets what its unit puts out, as the next one gets it.

        A hook of the unit's module is called for every unit that is the same module, such as a shared activation.
        """
        before, self._watched = self._watched, {**self._watched, **units}
        try:
            yield
        finally:
            self._watched = before

    def overwrites(self, unit: str) -> bool:
        """Whether a unit changes its input in place, as `describe` saw."""
        return unit in self._overwriting

    def _next_overwrites(self, unit: str) -> bool:
        after = self._order[self._order.index(unit) + 1 :]
        return bool(after) and self.overwrites(after[0])

    def _position(self, unit: str) -> int:
        if unit not in self._order:
            raise NoSuchNameError.of("unit", unit, list(self._order))
        return self._order.index(unit)


class Staged(nn.Sequential):
    """A sequence of units that knows what their order does not tell: stages, taps inside of units, channels."""

    def __init__(
        self,
        units: OrderedDict[str, nn.Module],
        *,
        stages: Sequence[int] | None = None,
        taps: Mapping[str, str],
        axes: Axes | None = None,
        anchors: Mapping[str, str] | None = None,
    ) -> None:
        """`taps` come on top of those that follow from the units, or replace them; without `stages` each is its own."""
        super().__init__(units)
        self.stages = tuple(range(len(units)) if stages is None else stages)
        self.taps = dict(taps)
        self.axes = axes
        self.anchors = anchors


def from_sequential(layers: nn.Sequential, *, input_shape: Sequence[int], stages: Sequence[int] | None = None) -> Model:
    """Give a sequence the contract: each child is a unit, the first the stem, the last the head.

    `stages` names the stage of each child; without it every block is a stage of its own, or what a `Staged` sequence
    says. The model shares the children.
    """
    model = Model(children_of(layers))
    if not isinstance(layers, Staged):
        return describe(model, input_shape=input_shape, stages=stages)
    model.channel_axes, model.anchor_names = layers.axes, layers.anchors
    return describe(model, input_shape=input_shape, stages=stages or layers.stages, taps=layers.taps)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """All children by name; `named_children` leaves out one that stands there twice, such as a shared activation."""
    return {name: child for name, child in module._modules.items() if child is not None}


def describe(
    model: Model,
    *,
    input_shape: Sequence[int],
    stages: Sequence[int] | None = None,
    taps: Mapping[str, str] | None = None,
    by_shape: bool = False,
) -> Model:
    """Fill in the model's units and taps by running one sample of zeros; `taps` come on top of the usual ones.

    `by_shape`: blocks in a row whose outputs have the shape of their inputs share a stage with the one before.
    """
    model.input_shape = tuple(input_shape)
    model.units = _describe(model, list(stages) if stages is not None else list(range(len(model.order))))
    if by_shape:
        model.units = _staged_by_shape(model.units)
    model.taps = {**_taps(model.units), **(taps or {})}
    for name in set(model.taps.values()) - set(model.order):
        model.get_submodule(name)  # a tap on nothing is a mistake of the architecture's file: known at once
    return model


def _staged_by_shape(units: Sequence[Unit]) -> tuple[Unit, ...]:
    staged: list[Unit] = []
    for unit in units:
        before = staged[-1] if staged else None
        begins = before is None or unit.kind == "head" or before.kind == "stem" or unit.in_shape != unit.out_shape
        stage = 0 if before is None else before.stage + begins
        index = 0 if begins or before is None else before.index + 1
        staged.append(replace(unit, stage=stage, index=index))
    return tuple(staged)


def _describe(model: Model, stages: list[int]) -> tuple[Unit, ...]:
    """Run one sample of zeros through the units to learn shapes and sizes."""
    if len(stages) != len(model.order):
        raise ValueError(f"expected a stage for each of {len(model.order)} units, got {len(stages)}")
    units: list[Unit] = []
    was_training = model.training
    model.eval()  # one sample has no batch statistics
    with torch.no_grad():
        x = torch.zeros(1, *model.input_shape)
        for position, name in enumerate(model.order):
            version = x._version
            unit, out = _describe_unit(model, position, stages, x)
            changed = x._version != version or _begins_in_place(model.unit(name))
            model._overwriting |= {name} if changed else set()
            units.append(unit)
            x = out
    model.train(was_training)
    return tuple(units)


def _describe_unit(model: Model, position: int, stages: list[int], x: Tensor) -> tuple[Unit, Tensor]:
    """The unit at a position, and its output for `x`."""
    name = model.order[position]
    module = model.unit(name)
    leaves = [part for part in module.modules() if not any(part.children())]
    with _single_values(module) as single:
        out, num_activations = count_outputs(module, x, leaves)
    parameters, buffers = model.tensors_of_unit(name)
    unit = Unit(
        name=name,
        kind="head" if position == len(stages) - 1 else "stem" if position == 0 else "block",
        stage=stages[position],
        index=stages[:position].count(stages[position]),
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        in_shape=tuple(x.shape[1:]),
        out_shape=tuple(out.shape[1:]),
        num_activations=max(num_activations, out.numel()),
        min_batch=2 if single else 1,
    )
    return unit, out


def _begins_in_place(module: nn.Module) -> bool:
    """Whether its first part says so: a Dropout does nothing to its input while the model is described."""
    first = next((part for part in module.modules() if not any(part.children())), None)
    return bool(getattr(first, "inplace", False))


def count_outputs(module: nn.Module, x: Tensor, counted: Iterable[nn.Module]) -> tuple[Tensor, int]:
    """The module's output, and the number of elements that the `counted` ones of its parts put out on the way."""
    count = 0

    def add(part: nn.Module, inputs: object, output: object) -> None:
        nonlocal count
        count += output.numel() if isinstance(output, Tensor) else 0

    hooks = [part.register_forward_hook(add) for part in counted]
    try:
        out: Tensor = module(x)
    finally:
        for hook in hooks:
            hook.remove()
    return out, count


@contextmanager
def _single_values(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The BatchNorms that get one value per channel of a sample, while the module is run."""
    norms_with_one_value: list[nn.Module] = []

    def look(part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs and inputs[0].numel() == inputs[0].shape[1]:
            norms_with_one_value.append(part)

    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    try:
        yield norms_with_one_value
    finally:
        for hook in hooks:
            hook.remove()


def _taps(units: Sequence[Unit]) -> dict[str, str]:
    """`stem_out`, `block_<k>_out`, `stage_<i>_out` (its last block), `features` (input of the head), `logits`."""
    blocks = [unit for unit in units if unit.kind == "block"]
    taps = {f"block_{number}_out": unit.name for number, unit in enumerate(blocks, start=1)}
    taps |= {f"stage_{unit.stage}_out": unit.name for unit in blocks}
    if units[0].kind == "stem":
        taps["stem_out"] = units[0].name
    if len(units) > 1:
        taps["features"] = units[-2].name
    taps["logits"] = units[-1].name
    return taps
