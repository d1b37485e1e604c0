"""Which unit has which parameters and buffers, and which cuts stand in the way of that.

A parameter belongs to the unit in which it gets a gradient, or else to the one that calls its module; a buffer to the
unit that calls its module. A tensor with two such units joins all units between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from edge_client.models.found_units.calls import Call

__all__ = ["joined", "parts_of", "spans_by_unit", "unit_calls"]


def unit_calls(calls: Sequence[Call], cuts: Sequence[int]) -> list[list[Call]]:
    """The calls that lie in each unit as a whole."""
    ends = [0, *(calls[cut].end for cut in cuts), len(calls)]
    return [[call for call in calls if begin <= call.number and call.end <= end] for begin, end in pairwise(ends)]


def parts_of(module: nn.Module, calls: Sequence[Call], cuts: Sequence[int]) -> list[dict[str, nn.Module]]:
    """The submodules that each unit calls, by their paths."""
    named = dict(module.named_modules())
    return [{call.path: named[call.path] for call in inside} for inside in unit_calls(calls, cuts)]


def joined(
    module: nn.Module, calls: Sequence[Call], cuts: Sequence[int], trained: Sequence[set[str]]
) -> tuple[list[int], list[set[str]]]:
    """The cuts that remain, and what each unit trains: none twice, no unit without anything."""
    remaining, owned = list(cuts), [set(names) for names in trained]
    buffers = _called_buffers(module, calls, cuts)
    while remaining:
        pair = _shared(owned, buffers)
        if pair is None:
            empty = next((number for number, names in enumerate(owned) if not names), None)
            if empty is None:
                break
            last = len(owned) - 1
            pair = (empty - 1, empty) if empty == last else (empty, empty + 1)
        start, end = pair
        for sets in (owned, buffers):
            sets[start : end + 1] = [set().union(*sets[start : end + 1])]
        del remaining[start:end]
    return remaining, owned


def _shared(owned: Sequence[set[str]], buffers: Sequence[set[str]]) -> tuple[int, int] | None:
    for first in range(len(owned)):
        for last in range(len(owned) - 1, first, -1):
            if owned[first] & owned[last] or buffers[first] & buffers[last]:
                return first, last
    return None


def _called_buffers(module: nn.Module, calls: Sequence[Call], cuts: Sequence[int]) -> list[set[str]]:
    return [
        {f"{path}.{name}" for path, part in parts.items() for name, _ in part.named_buffers(recurse=False)}
        for parts in parts_of(module, calls, cuts)
    ]


def spans_by_unit(
    module: nn.Module, calls: Sequence[Call], cuts: Sequence[int], owned: Sequence[set[str]]
) -> tuple[tuple[int, int], ...]:
    """The unit of each tensor that travels, in the order of `state_dict`: as runs of (unit, number of tensors)."""
    trained = {name: number for number, names in enumerate(owned) for name in names}
    called = {path: number for number, parts in enumerate(parts_of(module, calls, cuts)) for path in parts}
    spans: list[tuple[int, int]] = []
    for name in module.state_dict():
        number = trained.get(name, _called_in(name.rpartition(".")[0], called, len(owned) - 1))
        if spans and spans[-1][0] == number:
            spans[-1] = (number, spans[-1][1] + 1)
        else:
            spans.append((number, 1))
    return tuple(spans)


def _called_in(path: str, called: dict[str, int], last: int) -> int:
    """The unit that calls a module, or one that it lies in; the last one for what nobody calls."""
    while path and path not in called:
        path = path.rpartition(".")[0]
    return called.get(path, last)
