"""InclusiveFL. Liu et al., "No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices", KDD 2022.

Devices train models of different depth, the smaller ones inside the larger. Layers at the bottom are averaged over all
that have them. The top layer of each size, which reads out what comes before it, is averaged inside its size alone, and
so is its classifier; it also learns from the larger size, whose further layers do what it has to do alone. Down and
up: a slice of the model, with the top blocks and the classifier of its size.

    m = mean of the larger neighbour's updates of its blocks d_s ... d_l, as its devices sent them
    g_s <- (1 - beta) g_s + beta m      of the top block d_s of size s, where the neighbour has d_l > d_s blocks

A model of stages has a top block in every stage whose depth is not the same in all sizes; m is the mean over those of
the larger size's blocks that have a tensor of this name and shape.

Deviations: updates (new - old) take the place of gradients that the server would apply with an optimizer of its own.
The authors' code overwrites the sum of m by its last summand and never applies it. Buffers have no m. A size or a
neighbour without an update in a round leaves its tensors as they are. The mean is weighted by n_k, as in the paper.

Legend: beta = parameters.momentum, s, l = neighbouring sizes, d = blocks in a stage, g = mean update of a size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from edge_client.errors import InputError
from edge_client.methods.base import Frozen, Method, Place, PlainClient, SliceRules, State, Travel
from edge_client.methods.cards.inclusivefl import InclusiveFLParameters
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.slices import architecture, slice_places
from edge_client.models.contract import Model, Unit
from edge_client.models.slicing import parse, units_of_slice
from edge_client.params import coverage_mean, is_buffer
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX

__all__ = ["InclusiveFLServer", "method"]

_MOMENTUM = "momentum"  # note: of each top block that learns [its beginning, size, larger size, beginnings of blocks]
Lesson = tuple[str, str, str, Sequence[str]]


class InclusiveFLServer(CoverageServer):
    """The coverage mean; top blocks take over a part of what the larger neighbour's blocks learned."""

    def __init__(self, parameters: InclusiveFLParameters) -> None:
        super().__init__()
        self._beta = parameters.momentum

    def fold(self, state: State, frozen: Frozen, *, round: int) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the new state."""
        answered = {architecture(header.slice) for header in frozen.headers}
        lessons_of_run: Sequence[Lesson] = state.notes.get(_MOMENTUM, ()) if self._beta > 0 else ()
        lessons = [lesson for lesson in lessons_of_run if {lesson[1], lesson[2]} <= answered]
        for name in state.names():
            old = state.tensor(name)
            new = self.fold_tensor(name, old, frozen)
            lesson = next((lesson for lesson in lessons if name.startswith(lesson[0])), None)
            if lesson is not None and old.is_floating_point() and not is_buffer(name):
                learned = self._learned(name, old, lesson, state, frozen)
                new = (new.double() + self._beta * (learned - (new.double() - old.double()))).to(old.dtype)
            yield name, new

    def _learned(self, name: str, old: Tensor, lesson: Lesson, state: State, frozen: Frozen) -> Tensor:
        """m, float64."""
        top, _, size, blocks = lesson
        total, count = torch.zeros(old.shape, dtype=torch.float64), 0
        names = frozenset(state.names())
        for source in (block + name.removeprefix(top) for block in blocks):
            before = state.tensor(source) if source in names else None
            if before is None or before.shape != old.shape:
                continue
            column = (row for row in frozen.column(source) if architecture(row[0].slice) == size)
            parts = ((value, where, self.weight(header)) for header, value, where in column)
            total += coverage_mean(before, parts).double() - before.double()
            count += 1
        return total / count


class _Sizes:
    """The blocks of each size, the largest first, and what belongs to one of them alone."""

    def __init__(self, model: Model, rungs: Sequence[str]) -> None:
        self.rungs = tuple(rungs)
        self.head = model.units[-1]
        self.blocks = {rung: _by_stage(units_of_slice(model, parse(rung))) for rung in rungs}
        stages = sorted({stage for by_stage in self.blocks.values() for stage in by_stage})
        self.differing = [stage for stage in stages if len({len(self._blocks(rung, stage)) for rung in rungs}) > 1]

    def _blocks(self, rung: str, stage: int) -> list[Unit]:
        return self.blocks[rung].get(stage, [])

    def separate_units(self, rung: str) -> list[Unit]:
        """The units of a size that it shares with no other; those of the largest lie in the model itself."""
        if rung == self.rungs[0] or rung not in self.blocks:
            return []
        return [*(self._blocks(rung, stage)[-1] for stage in self.differing if self._blocks(rung, stage)), self.head]

    def prefix_of(self, rung: str, unit: Unit) -> str:
        """The prefix of a unit's tensors on the server."""
        return f"{_prefix(rung) if unit in self.separate_units(rung) else ''}{unit.name}."

    def lessons(self) -> Iterator[Lesson]:
        """The lesson of every top block that has a neighbour with more blocks."""
        for larger, rung in pairwise(self.rungs):
            for stage in self.differing:
                blocks, larger_blocks = self._blocks(rung, stage), self._blocks(larger, stage)
                if 0 < len(blocks) < len(larger_blocks):
                    sources = [self.prefix_of(larger, block) for block in larger_blocks[len(blocks) - 1 :]]
                    yield self.prefix_of(rung, blocks[-1]), rung, larger, sources


def _by_stage(units: Sequence[Unit]) -> dict[int, list[Unit]]:
    stages: dict[int, list[Unit]] = {}
    for unit in units:
        if unit.kind == "block":
            stages.setdefault(unit.stage, []).append(unit)
    return stages


def _prefix(rung: str) -> str:
    return f"{EXTRA_PREFIX}{rung}/"


def _places(rungs: Sequence[str], model: Model, slice_name: str, names: Sequence[str]) -> Mapping[str, Place]:
    """Where a slice's tensors lie: at its positions, but for those that its size has of its own."""
    separate = tuple(f"{MODEL_PREFIX}{unit.name}." for unit in _Sizes(model, rungs).separate_units(slice_name))
    places = slice_places(model, slice_name, [name for name in names if name.startswith(MODEL_PREFIX)])
    return {
        name: Place(_prefix(slice_name) + name.removeprefix(MODEL_PREFIX), place.where)
        if name.startswith(separate)
        else place
        for name, place in places.items()
    }


def _separate_tensors(rungs: Sequence[str], model: Model) -> Mapping[str, Tensor]:
    """All sizes begin with the weights that the model has at their positions."""
    sizes, state = _Sizes(model, rungs), model.state_dict()
    return {
        f"{rung}/{name}": tensor.clone()
        for rung in rungs
        for unit in sizes.separate_units(rung)
        for name, tensor in state.items()
        if name in unit.parameters or name in unit.buffers
    }


def _no_tensors(model: Model, slice_name: str) -> Mapping[str, Tensor]:
    """A device gets the tensors of its size as the model's own."""
    return {}


def _notes(rungs: Sequence[str], model: Model) -> Mapping[str, Any]:
    lessons = [[top, rung, larger, list(blocks)] for top, rung, larger, blocks in _Sizes(model, rungs).lessons()]
    return {_MOMENTUM: lessons} if lessons else {}


def _check(rungs: Sequence[str], model: Model) -> None:
    """Raise `InputError` unless sizes lie inside one another: neighbours would have nothing to learn from."""
    if len(rungs) == 1:
        return
    if not hasattr(model, "units"):
        raise InputError(
            "method 'inclusivefl' needs the shape of a sample on the server, too; tell it, Task(input=(3, 96, 96))"
        )
    names = {rung: {unit.name for unit in units_of_slice(model, parse(rung))} for rung in rungs}
    for larger, rung in pairwise(rungs):
        if not names[rung] < names[larger]:
            raise InputError(
                f"slices: 'inclusivefl' needs each inside the one before it, and {rung!r} is not inside {larger!r}; "
                "name the largest first, none with more blocks in a stage than the one before"
            )


def method(parameters: InclusiveFLParameters, *, rungs: Sequence[str]) -> Method:
    """InclusiveFL for these slices, for the registry."""
    return Method(
        client=PlainClient,
        server=InclusiveFLServer(parameters),
        check=partial(_check, rungs),
        travel=Travel(
            extra_tensors=partial(_separate_tensors, rungs), extra_of_slice=_no_tensors, notes=partial(_notes, rungs)
        ),
        slices=SliceRules(places=partial(_places, rungs)),
    )
