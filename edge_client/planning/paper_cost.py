"""FeDepth's own memory rule and its greedy decomposition into groups (FeDepth, Table 1 and Figure 4).

    bytes(unit) = 2 x 4 x batch x (elements that its layers but ReLU, and the unit itself, put out) + 4 x parameters

Table 1 counts in MiB with a batch of 32; the head, the input and the optimizer's state are left out, and the stem is
trained with the first group without being charged. It is kept because results are compared with it: the true peak of
the full network is less than half of what it says, that of a single block about three quarters.
Does not cover: what training really takes (`cost`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from edge_client.errors import NothingFitsError
from edge_client.models.contract import Model, Unit, count_outputs

__all__ = ["Decomposition", "block_costs", "decompose", "full_cost", "unit_cost"]

_FLOAT = 4
_FORWARD_AND_BACKWARD = 2
# containers, and what the network that the authors measured does by a function: it is no module there
_NOT_COUNTED = (nn.Sequential, nn.ReLU, nn.Flatten, nn.Identity)


def unit_cost(model: Model, unit: Unit, *, batch: int) -> int:
    """Bytes that the paper's rule charges for one unit."""
    if batch < 1:
        raise ValueError(f"expected a batch of at least one sample, got {batch}")
    module = model.unit(unit.name)
    counted = [part for part in module.modules() if not isinstance(part, _NOT_COUNTED)]
    with _evaluating(module), torch.no_grad():
        _, outputs = count_outputs(module, torch.zeros(1, *unit.in_shape), counted)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return _FORWARD_AND_BACKWARD * _FLOAT * batch * outputs + _FLOAT * parameters


def block_costs(model: Model, *, batch: int, charge_stem: bool = False) -> dict[str, int]:
    """Cost of each block in order; `charge_stem` adds the stem, which is trained with it, to the first."""
    costs = {unit.name: unit_cost(model, unit, batch=batch) for unit in model.units if unit.kind == "block"}
    if charge_stem and costs:
        costs[next(iter(costs))] += _stem_cost(model, batch)
    return costs


def full_cost(model: Model, *, batch: int) -> int:
    """Stem and all blocks: what the paper calls the full network, and takes its budgets from."""
    return _stem_cost(model, batch) + sum(block_costs(model, batch=batch).values())


def _stem_cost(model: Model, batch: int) -> int:
    return sum(unit_cost(model, unit, batch=batch) for unit in model.units if unit.kind == "stem")


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """A sample of zeros leaves no trace in running statistics; every part keeps its own mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """Consecutive units: first those that are never trained, then the groups that are trained one after another."""

    skipped: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]


def decompose(
    costs: Mapping[str, float], budget: float, *, tolerance: float = 0.05, partial: bool = False
) -> Decomposition:
    """Groups from left to right, each as long as it stays within `budget` x (1 + `tolerance`).

    `partial` leaves the first units untrained if each of them is above that by itself. A tolerance of 0.05 gives every
    split of the paper; without any, its smallest devices would not fit their own budgets. Raises `NothingFitsError`
    with the smallest larger budget that would do. Costs and budget have the same unit, whichever it is.
    """
    _check_numbers(costs, budget, tolerance)
    limit = budget * (1 + tolerance)
    names = list(costs)
    start = _first_trained(list(costs.values()), limit, partial)
    if start is None:
        raise _nothing_fits(costs, budget, tolerance, partial)
    groups: list[list[str]] = []
    group_cost = 0.0
    for name in names[start:]:
        if groups and group_cost + costs[name] <= limit:
            groups[-1].append(name)
            group_cost += costs[name]
        else:
            groups.append([name])
            group_cost = costs[name]
    return Decomposition(skipped=tuple(names[:start]), groups=tuple(tuple(group) for group in groups))


def _first_trained(costs: Sequence[float], limit: float, partial: bool) -> int | None:
    """Position of the first unit that is trained; None if that or a later one is above the limit by itself."""
    fitting = (position for position, cost in enumerate(costs) if cost <= limit)
    start = next(fitting, None) if partial else 0
    return None if start is None or max(costs[start:]) > limit else start


def _check_numbers(costs: Mapping[str, float], budget: float, tolerance: float) -> None:
    if not costs:
        raise ValueError("expected the cost of at least one unit, got none")
    odd = [name for name, cost in costs.items() if not (math.isfinite(cost) and cost >= 0)]
    if odd:
        raise ValueError(f"expected finite costs of 0 or more, got {costs[odd[0]]!r} for {odd[0]!r}")
    if not (math.isfinite(budget) and math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"expected a finite budget and a tolerance of 0 or more, got {budget!r} and {tolerance!r}")


def _nothing_fits(costs: Mapping[str, float], budget: float, tolerance: float, partial: bool) -> NothingFitsError:
    values, limit = list(costs.values()), budget * (1 + tolerance)
    start = next((position for position, cost in enumerate(values) if cost <= limit), 0) if partial else 0
    worst = next(name for name, cost in list(costs.items())[start:] if cost > limit)
    enough = min(cost for cost in values if cost > limit and _first_trained(values, cost, partial) is not None)
    advice = "" if partial or worst != next(iter(costs)) else ", or allow partial training"
    return NothingFitsError(
        f"unit {worst!r} costs {costs[worst]:.15g}, the budget is {budget:.15g} with a tolerance of {tolerance:.3g}; "
        f"the smallest larger budget that would do is {_budget_for(enough, tolerance):.15g}{advice}"
    )


def _budget_for(limit: float, tolerance: float) -> float:
    """Rounded up, so that what is printed is enough when it is typed: to bytes, or four digits of MB and GB."""
    scale = 1 if limit >= 1e6 else 10**4
    scaled = math.ceil(limit / (1 + tolerance) * scale)
    return scaled / scale if scaled / scale * (1 + tolerance) >= limit else (scaled + 1) / scale
