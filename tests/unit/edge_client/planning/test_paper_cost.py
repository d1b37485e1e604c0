"""FeDepth's own rule: Table 1 to the last digit, and every split that the paper and its code use."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import NothingFitsError
from edge_client.models import registry
from edge_client.models.contract import Model
from edge_client.planning.paper_cost import Decomposition, block_costs, decompose, full_cost, unit_cost

MIB = 2**20
PRINTED = [20.02, 20.02, 20.02, 14.05, 10.07, 10.07, 7.21, 5.28, 5.28]
TABLE = {f"B{number}": cost for number, cost in enumerate(PRINTED, start=1)}
FULL = 116.04
FIGURE_4 = {"1": 3, "2": 2, "3": 1, "4": 0.5, "5": 0.5, "6": 0.5}  # GB


@pytest.fixture(scope="module")
def preresnet20() -> Model:
    torch.manual_seed(0)
    return registry.build("preresnet20", input_shape=(3, 32, 32), num_classes=10, options={})


def _split(*groups: str, skipped: str = "", prefix: str = "B") -> Decomposition:
    """`"123"` are B1, B2, B3."""
    names = [tuple(f"{prefix}{digit}" for digit in group) for group in (skipped, *groups)]
    return Decomposition(skipped=names[0], groups=tuple(names[1:]))


def _truncated(value: float) -> float:
    return math.floor(value * 100) / 100


def test_table_1_by_hand(preresnet20: Model) -> None:
    """B1: 5 outputs of 16x32x32, 2 x 16 x 16 x 9 + 4 x 16 weights; B4: 16x32x32 and 5 of 32x16x16, 14,432 weights."""
    costs = block_costs(preresnet20, batch=32)
    assert costs["block1"] == 8 * 32 * 5 * 16_384 + 4 * (4_608 + 64)
    assert costs["block4"] == 8 * 32 * (16_384 + 5 * 8_192) + 4 * (4_608 + 9_216 + 32 + 64 + 512)


def test_table_1_to_the_last_digit(preresnet20: Model) -> None:
    """MiB at batch 32; 20.0178 and its like are rounded in the paper, 14.0551 (B4) and 7.2195 (B7) cut off."""
    costs = [cost / MIB for cost in block_costs(preresnet20, batch=32).values()]
    computed = [20.0178] * 3 + [14.0551] + [10.0708] * 2 + [7.2195] + [5.2822] * 2
    assert [round(cost, 4) for cost in costs] == computed
    printed = [_truncated(cost) if number in (4, 7) else round(cost, 2) for number, cost in enumerate(costs, start=1)]
    assert printed == PRINTED


def test_the_full_network_costs_what_the_paper_says(preresnet20: Model) -> None:
    """The nine blocks and the stem's convolution, 4.0016 MiB: 116.0357; the head, 1.02 MiB, is left out."""
    full = full_cost(preresnet20, batch=32)
    assert round(full / MIB, 4) == 116.0357
    assert round(full / MIB, 2) == FULL
    stem, head = preresnet20.units[0], preresnet20.units[-1]
    assert round(unit_cost(preresnet20, stem, batch=32) / MIB, 4) == 4.0016
    # norm 4,096, pool 64 and linear 10 elements; 128 + 650 weights
    assert unit_cost(preresnet20, head, batch=32) == 8 * 32 * 4_170 + 4 * 778


def test_the_batch_is_a_parameter(preresnet20: Model) -> None:
    """Activations grow with it, weights do not: B1 holds 81,920 elements and 4,672 weights."""
    unit = preresnet20.units[1]  # B1
    assert [unit_cost(preresnet20, unit, batch=n) for n in (1, 128)] == [655_360 + 18_688, 128 * 655_360 + 18_688]
    with pytest.raises(ValueError, match="got 0"):
        unit_cost(preresnet20, unit, batch=0)


def test_the_stem_is_charged_on_demand(preresnet20: Model) -> None:
    """To the first block, with which it is trained: 24 % above a sixth of 116.04."""
    plain, charged = (block_costs(preresnet20, batch=32, charge_stem=charge) for charge in (False, True))
    assert charged["block1"] - plain["block1"] == 8 * 32 * 16_384 + 4 * 432
    assert list(charged.items())[1:] == list(plain.items())[1:]
    assert round(charged["block1"] / MIB / (FULL / 6), 2) == 1.24


def test_counting_leaves_no_trace() -> None:
    """Modes and running statistics are as before; any model of the contract has a cost."""
    torch.manual_seed(0)
    model = registry.build("resnet10", input_shape=(3, 32, 32), num_classes=3, options={"base_width": 2}).train()
    model.get_submodule("stage2_block1.norm1").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    assert all(cost > 0 for cost in block_costs(model, batch=4).values())
    assert modes == [part.training for part in model.modules()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


SPLITS = [
    (1 / 6, _split("1", "2", "3", "4", "56", "789")),
    (1 / 3, _split("12", "34", "56789")),
    (1 / 2, _split("123", "456789")),
    (1, _split("123456789")),
    (1 / 8, _split("4", "5", "6", "78", "9", skipped="123")),
]


@pytest.mark.parametrize(("ratio", "expected"), SPLITS)
def test_the_splits_of_the_paper(ratio: float, expected: Decomposition, preresnet20: Model) -> None:
    """Budgets of 19.34, 38.68, 58.02, 116.04 and 14.51, from Table 1 and from our own costs alike."""
    partial = ratio == 1 / 8
    assert decompose(TABLE, FULL * ratio, partial=partial) == expected
    costs = dict(zip(TABLE, block_costs(preresnet20, batch=32).values(), strict=True))
    assert decompose(costs, full_cost(preresnet20, batch=32) * ratio, partial=partial) == expected


def test_without_tolerance_other_splits_come_out() -> None:
    """A third: {1}{2}{3,4}{5..9}; a half: {1,2}{3..6}{7,8,9}; a sixth, 19.34, cannot hold B1, 20.02."""
    assert decompose(TABLE, FULL / 3, tolerance=0) == _split("1", "2", "34", "56789")
    assert decompose(TABLE, FULL / 2, tolerance=0) == _split("12", "3456", "789")
    with pytest.raises(NothingFitsError, match=r"unit 'B1' costs 20\.02, .* that would do is 20\.02, or allow partial"):
        decompose(TABLE, FULL / 6, tolerance=0)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (3, _split("1", "23", "456", prefix="")),
        (5, _split("12", "3456", prefix="")),
        (2, _split("2", "345", "6", skipped="1", prefix="")),
        (7.5, _split("123456", prefix="")),
    ],
)
def test_the_splits_of_figure_4(budget: float, expected: Decomposition) -> None:
    """Blocks of 3, 2, 1 and three of 0.5 GB."""
    assert decompose(FIGURE_4, budget, partial=budget == 2) == expected


def test_a_later_unit_above_the_limit_is_an_error() -> None:
    """Only the first units may be left out: 5 behind 1 cannot; 5 / 1.05 = 4.7619... is enough."""
    costs = {"a": 1, "b": 5, "c": 2}
    for partial in (False, True):
        with pytest.raises(NothingFitsError, match=r"unit 'b' costs 5, the budget is 3 .* would do is 4\.762$"):
            decompose(costs, 3, partial=partial)
    assert decompose(costs, 4.762).groups == (("a",), ("b",), ("c",))


def test_a_budget_too_small_for_a_first_unit_names_partial_training() -> None:
    """14.51 holds no B1 (19.0667 would: 20.02 / 1.05); with partial training it does."""
    with pytest.raises(NothingFitsError, match=r"would do is 19\.0667, or allow partial training$"):
        decompose(TABLE, FULL / 8)


@pytest.mark.parametrize("budget", [0, -1, 5.0])
def test_nothing_fits_at_all(budget: float) -> None:
    """With partial training the smallest budget holds B8 and B9, the last ones: 5.28 / 1.05 = 5.0285..."""
    with pytest.raises(NothingFitsError, match=r"would do is 5\.0286$"):
        decompose(TABLE, budget, partial=True)
    assert decompose(TABLE, 5.0286, partial=True) == _split("8", "9", skipped="1234567")


def test_a_larger_budget_is_named_where_a_smaller_one_would_do_too() -> None:
    """2, 3, 1 with a budget of 2: the first unit fits and the second does not. 1 would do, but 3 is what to ask for."""
    costs = {"a": 2, "b": 3, "c": 1}
    assert decompose(costs, 1, tolerance=0, partial=True).groups == (("c",),)
    with pytest.raises(NothingFitsError, match=r"would do is 3$"):
        decompose(costs, 2, tolerance=0, partial=True)


@pytest.mark.parametrize(
    ("costs", "budget", "tolerance", "message"),
    [
        ({}, 1, 0.05, "at least one unit"),
        ({"a": math.nan}, 1, 0.05, "got nan for 'a'"),
        ({"a": -1}, 1, 0.05, "got -1 for 'a'"),
        ({"a": 1}, math.inf, 0.05, "finite budget"),
        ({"a": 1}, 1, -0.1, "tolerance of 0 or more"),
    ],
)
def test_numbers_are_checked(costs: dict[str, float], budget: float, tolerance: float, message: str) -> None:
    """These are a caller's mistakes."""
    with pytest.raises(ValueError, match=message):
        decompose(costs, budget, tolerance=tolerance)


def _fewest(costs: Sequence[float], limit: float) -> int:
    """The smallest number of groups within the limit, by dynamic programming."""
    best = [0] + [len(costs)] * len(costs)
    for end in range(1, len(costs) + 1):
        best[end] = min(best[start] + 1 for start in range(end) if sum(costs[start:end]) <= limit)
    return best[-1]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(0, 40), st.booleans())
def test_groups_are_few_whole_and_inside(costs: list[int], budget: int, partial: bool) -> None:
    """All units in order, each group within the limit, as few groups as there can be; or a budget that is enough."""
    named: dict[str, float] = {str(number): cost for number, cost in enumerate(costs)}
    limit = budget * 1.05
    try:
        made = decompose(named, budget, partial=partial)
    except NothingFitsError as error:
        (enough,) = (float(number) for number in re.findall(r"would do is ([0-9.]+)", str(error)))
        assert enough > budget
        made, limit = decompose(named, enough, partial=partial), enough * 1.05
    trained = [name for group in made.groups for name in group]
    assert [*made.skipped, *trained] == list(named)
    assert all(sum(named[name] for name in group) <= limit for group in made.groups)
    assert all(named[name] > limit for name in made.skipped)
    assert len(made.groups) == _fewest([named[name] for name in trained], limit)
