"""What every model shows of itself: ordered units, named taps, and running a part of it.

    forward(x)  ==  forward_from(units[k + 1].name, forward_to(units[k].name, x))    for every k

Methods and planners ask the model; none looks at its name or class. An `nn.Sequential` gets the contract for free, any
other module by naming its units in order (`models.adopted` checks that they are the whole model).
Does not cover: slices of depth or width; they will be index maps into the full model and change nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_client.errors import NoSuchNameError

__all__ = ["Model", "Unit", "children_of", "describe", "from_sequential"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The smallest piece of a model that can be trained by itself."""

    name: str
    kind: str  # stem | block | head
    stage: int  # 0: stem; blocks of equal resolution share a stage; the head comes after the last
    index: int  # position inside its stage
    parameters: tuple[str, ...]  # names in the whole model
    in_shape: tuple[int, ...]  # without the batch axis
    out_shape: tuple[int, ...]
    num_activations: int  # elements that all layers of the unit put out for one sample


class Model(nn.Module):
    """Units that run one after another; `taps` maps a name to the unit whose output it is."""

    units: tuple[Unit, ...]
    taps: Mapping[str, str]
    input_shape: tuple[int, ...]

    def __init__(self, layers: Mapping[str, nn.Module], order: Sequence[str] | None = None) -> None:
        """`order` names the units, as dotted names below `layers`; without it every layer is one."""
        super().__init__()
        if not layers:
            raise ValueError("expected a model of at least one unit, got none")
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._order = tuple(layers if order is None else order)

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the units."""
        return self._order

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        return self._run(self._order, x)

    def forward_to(self, unit: str, x: Tensor) -> Tensor:
        """Output of `unit` for an input of the model."""
        return self._run(self._order[: self._position(unit) + 1], x)

    def forward_from(self, unit: str, x: Tensor) -> Tensor:
        """Logits for an input of `unit`."""
        return self._run(self._order[self._position(unit) :], x)

    def _run(self, names: Sequence[str], x: Tensor) -> Tensor:
        for name in names:
            x = self.get_submodule(name)(x)
        return x

    def _position(self, unit: str) -> int:
        if unit not in self._order:
            raise NoSuchNameError.of("unit", unit, list(self._order))
        return self._order.index(unit)


def from_sequential(layers: nn.Sequential, *, input_shape: Sequence[int], stages: Sequence[int] | None = None) -> Model:
    """Give a sequence the contract: each child is a unit, the first the stem, the last the head.

    `stages` names the stage of each child; without it every block is a stage of its own. The model shares the children.
    """
    return describe(Model(children_of(layers)), input_shape=input_shape, stages=stages)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """All children by name; `named_children` leaves out one that stands there twice, such as a shared activation."""
    return {name: child for name, child in module._modules.items() if child is not None}


def describe(model: Model, *, input_shape: Sequence[int], stages: Sequence[int] | None = None) -> Model:
    """Fill in the model's units and taps by running one sample of zeros."""
    model.input_shape = tuple(input_shape)
    model.units = _describe(model, list(stages) if stages is not None else list(range(len(model.order))))
    model.taps = _taps(model.units)
    return model


def _describe(model: Model, stages: list[int]) -> tuple[Unit, ...]:
    """Run one sample of zeros through the units to learn shapes and sizes."""
    children = {name: model.get_submodule(name) for name in model.order}
    if len(stages) != len(children):
        raise ValueError(f"expected a stage for each of {len(children)} units, got {len(stages)}")
    units: list[Unit] = []
    was_training = model.training
    model.eval()  # one sample has no batch statistics
    with torch.no_grad():
        x = torch.zeros(1, *model.input_shape)
        for position, (name, child) in enumerate(children.items()):
            out, num_activations = _count_outputs(child, x)
            kind = "head" if position == len(children) - 1 else "stem" if position == 0 else "block"
            unit = Unit(
                name=name,
                kind=kind,
                stage=stages[position],
                index=stages[:position].count(stages[position]),
                parameters=tuple(f"{name}.{parameter}" for parameter, _ in child.named_parameters()),
                in_shape=tuple(x.shape[1:]),
                out_shape=tuple(out.shape[1:]),
                num_activations=num_activations,
            )
            units.append(unit)
            x = out
    model.train(was_training)
    return tuple(units)


def _count_outputs(unit: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The unit's output, and the number of elements that its innermost modules put out."""
    count = 0

    def add(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal count
        count += output.numel() if isinstance(output, Tensor) else 0

    leaves = [module for module in unit.modules() if not any(module.children())]
    hooks = [leaf.register_forward_hook(add) for leaf in leaves]
    try:
        out: Tensor = unit(x)
    finally:
        for hook in hooks:
            hook.remove()
    return out, max(count, out.numel())


def _taps(units: Sequence[Unit]) -> dict[str, str]:
    """`stem_out`, `stage_<i>_out` (its last block), `features` (input of the head), `logits`."""
    taps = {f"stage_{unit.stage}_out": unit.name for unit in units if unit.kind == "block"}
    if units[0].kind == "stem":
        taps["stem_out"] = units[0].name
    if len(units) > 1:
        taps["features"] = units[-2].name
    taps["logits"] = units[-1].name
    return taps
