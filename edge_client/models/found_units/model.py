"""A module whose units were found, with the contract of every model.

`FoundModel` shares the tensors and submodules of the user's module, so that all names are those of its owner; each
unit runs a part of the module's own forward(). A model that was shortened leaves blocks out by carrying on from one
unit to a later one; what it left out has no memory and no name any more.
Covers: units as modules, running several of them in one pass where nobody looks between them.
Does not cover: finding units (`search`), what a model shows of itself (`contract`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from edge_client.models.contract import Model
from edge_client.models.found_units.calls import Call
from edge_client.models.found_units.ownership import unit_calls
from edge_client.models.found_units.result import FoundUnits
from edge_client.models.found_units.running import PartRunner
from edge_client.models.owners import Owner, owners_of

__all__ = ["FoundModel", "FoundUnit"]


class FoundUnit(nn.Module):
    """One unit: its parts and tensors are those of the user's module, under the names that they have there.

    Its mode is that of its parts. What lies around several units, such as the module itself, has it while they run.
    """

    def __init__(self, whole: FoundModel, number: int, tensors: Sequence[str], calls: Sequence[Call]) -> None:
        super().__init__()
        self.__dict__["_whole"] = whole  # no child: this unit is a part of it
        self._number = number
        names = frozenset(tensors)
        self._owners = [owner for owner in owners_of(whole.module) if owner.name in names]
        paths = dict.fromkeys(call.path for call in calls)
        self.__dict__["_parts"] = {path: whole.module.get_submodule(path) for path in paths}

    def forward(self, x: Tensor) -> Tensor:
        """What the unit puts out."""
        whole: FoundModel = self.__dict__["_whole"]
        return whole.run_part(self._number, self._number, x)

    @property
    def is_training(self) -> bool:
        """Whether its parts are in training mode; a unit of functions only has the whole's mode."""
        parts: dict[str, nn.Module] = self.__dict__["_parts"]
        whole: FoundModel = self.__dict__["_whole"]
        return any(part.training for part in parts.values()) if parts else whole.training

    def owners(self) -> Iterator[Owner]:
        """Where its parameters and buffers lie."""
        yield from self._owners

    # as other modules, but for the names

    def train(self, mode: bool = True) -> FoundUnit:
        """Set the mode of its parts."""
        for part in self.__dict__["_parts"].values():
            part.training = mode
        return self

    def named_modules(self, *_: Any, prefix: str = "", **__: Any) -> Iterator[tuple[str, nn.Module]]:
        """Its parts by their names in the user's module."""
        yield from self.__dict__["_parts"].items()

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Its parts."""
        yield from self.__dict__["_parts"].values()

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters by their names in the user's module."""
        tensors = ((owner.name, owner.value) for owner in self.owners())
        yield from ((name, tensor) for name, tensor in tensors if isinstance(tensor, nn.Parameter))

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        """Its buffers by their names in the user's module."""
        tensors = ((owner.name, owner.value) for owner in self.owners())
        yield from ((name, tensor) for name, tensor in tensors if not isinstance(tensor, nn.Parameter))

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Its tensors by their names in the user's module."""
        return {owner.name: owner.value.detach() for owner in self.owners()}


class FoundModel(Model):
    """The user's module as units that run one after another."""

    module: nn.Module

    def __init__(self, module: nn.Module, calls: Sequence[Call], units: FoundUnits, *, sample: Sequence[int]) -> None:
        """`calls` are those that the module makes, recorded here, for samples of the shape `sample`."""
        nn.Module.__init__(self)
        self.__dict__["module"] = module  # no child: its names would get a prefix
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._begin(units.names)
        self._runner = PartRunner(module, list(calls))
        self._cuts = units.cuts
        self._needs_input = units.needs_input
        self._sample = tuple(sample)
        self.found = units
        inside = unit_calls(calls, units.cuts)
        tensors = units.tensors(list(module.state_dict()))
        self._units = {
            name: FoundUnit(self, number, tensors[name], inside[number]) for number, name in enumerate(units.names)
        }
        self._units_by_number = list(self._units.values())
        self._around = _around(module, calls, inside)
        self.training = module.training

    def __setattr__(self, name: str, value: Any) -> None:
        """The contract's attributes stand beside the module's parts, which may have the same names."""
        object.__setattr__(self, name, value)

    def get_submodule(self, target: str) -> nn.Module:
        """A part of the user's module."""
        return self.module.get_submodule(target)

    def unit(self, name: str) -> FoundUnit:
        """The unit as a module."""
        return self._units[name]

    def tensors_of_unit(self, name: str) -> tuple[list[str], list[str]]:
        """Names of its parameters, and of its buffers that travel."""
        tensors = list(self._units[name].owners())
        parameters = [owner.name for owner in tensors if isinstance(owner.value, nn.Parameter)]
        return parameters, [owner.name for owner in tensors if not isinstance(owner.value, nn.Parameter)]

    def owners_of_unit(self, name: str) -> Iterator[Owner]:
        """Where its parameters and buffers lie."""
        return self._units[name].owners()

    def give_to_first_unit(self, names: Sequence[str]) -> None:
        """Tensors that were registered on the module after its units were found."""
        self._units_by_number[0]._owners += [owner for owner in owners_of(self.module) if owner.name in names]

    def train(self, mode: bool = True) -> FoundModel:
        """Set the mode of the module and all its parts, as its owner's own train() does."""
        self.training = mode
        self.__dict__["module"].train(mode)
        return self

    def run_units(self, names: Sequence[str], x: Tensor) -> Tensor:
        """Output of these units for an input of the first; in one pass where nothing happens between them."""
        apart = self._recompute == "units" or self._watched or not names
        numbers = [self._units[name]._number for name in names]
        follow = all(one + 1 == other for one, other in pairwise(numbers))
        modes = {self._units[name].is_training for name in names}
        if apart or not follow or len(modes) > 1:
            return super().run_units(names, x)
        return self.run_part(numbers[0], numbers[-1], x)

    def run_part(self, start: int, end: int, x: Tensor) -> Tensor:
        """From one found unit to another, in the mode of the first."""
        ends = [None, *self._cuts, None]
        given, carried = self._unpacked(start, x)
        mode = self._units_by_number[start].is_training
        with _in_mode(self._around, mode):
            out: Tensor = self._runner.run(ends[start], ends[end + 1], given, carried, needs_input=self._needs_input)
        last = len(self._cuts)
        return torch.cat([out.flatten(1), given.flatten(1)], dim=1) if self._needs_input and end < last else out

    def _unpacked(self, start: int, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The module's input, and what is carried into a unit; both in one tensor where units need both."""
        if start == 0:
            return x, None
        shape = self._runner.calls[self._cuts[start - 1]].leaves[0].two[1:]
        if not self._needs_input:
            return x.new_empty((len(x), *self._sample), device="meta"), x
        size = x.shape[1] - math.prod(self._sample)
        return x[:, size:].reshape(len(x), *self._sample), x[:, :size].reshape(len(x), *shape)

    def keep_units(self, names: Sequence[str]) -> FoundModel:
        """The model with these units only; the tensors of the others are taken out of it."""
        for name in self._order:
            if name in names:
                continue
            for owner in list(self._units[name].owners()):
                like = torch.empty(owner.value.shape, dtype=owner.value.dtype, device="meta")
                part = owner.part
                del owner.tensors[owner.key]
                part.__dict__[owner.key] = like  # forward() may look at it, on its way to the unit that runs
        self._order = tuple(names)
        return self


def _around(module: nn.Module, calls: Sequence[Call], inside: Sequence[Sequence[Call]]) -> list[nn.Module]:
    """The module, and its parts that lie around several units."""
    whole = {call.number for unit in inside for call in unit}
    paths = dict.fromkeys(call.path for call in calls if call.number not in whole)
    return [module, *(module.get_submodule(path) for path in paths)]


@contextmanager
def _in_mode(parts: Sequence[nn.Module], mode: bool) -> Iterator[None]:
    before = [part.training for part in parts]
    for part in parts:
        part.training = mode
    try:
        yield
    finally:
        for part, was_training in zip(parts, before, strict=True):
            part.training = was_training
