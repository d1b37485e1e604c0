"""How many devices a round asks, against exact binomial sums."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from coordinator.rounds.selection import choose, goal_and_quorum, num_to_ask


def _tail(quorum: int, n: int, drop: Fraction) -> Fraction:
    """P[Bin(n, 1 - drop) >= quorum], exactly."""
    keep = 1 - drop
    return sum((math.comb(n, k) * keep**k * drop ** (n - k) for k in range(quorum, n + 1)), Fraction(0))


@pytest.mark.parametrize(
    ("n", "quorum", "drop", "published"),
    [
        (13, 8, "0.06", 0.9999),  # goal 10 x 1.3
        (13, 8, "0.1", 0.9991),
        (13, 8, "0.3", 0.835),
        (15, 8, "0.3", 0.950),  # goal 10 x 1.5
        (45, 24, "0.3", 0.994),  # goal 30 x 1.5
        (130, 80, "0.3", 0.985),  # goal 100 x 1.3
        (13, 10, "0.1", 0.966),  # the full goal
    ],
)
def test_the_exact_sums_are_the_published_ones(n: int, quorum: int, drop: str, published: float) -> None:
    """The sizing figures that the design was made with, to the digits they were printed with."""
    digits = len(str(published)) - 2
    assert float(_tail(quorum, n, Fraction(drop))) == pytest.approx(published, abs=0.6 * 10**-digits)


@pytest.mark.parametrize("drop", ["0", "0.05", "0.1", "0.2", "0.3", "0.5"])
@pytest.mark.parametrize(("goal", "quorum"), [(1, 1), (2, 1), (4, 3), (10, 8), (30, 24), (50, 50)])
def test_the_smallest_number_that_reaches_999_of_1000_is_asked(goal: int, quorum: int, drop: str) -> None:
    """n is enough and n - 1 is not (or is below the goal); a fleet without failures counts as one with 10 %."""
    rate = max(Fraction(drop), Fraction(1, 10))
    enough = Fraction(999, 1000)
    n = num_to_ask(goal, quorum, drop_rate=float(drop), available=1000)
    assert n >= goal
    assert _tail(quorum, n, rate) >= enough - Fraction(1, 10**12)
    assert n == goal or _tail(quorum, n - 1, rate) < enough


def test_ten_devices_at_ten_percent_ask_thirteen() -> None:
    """By hand from the figures above: P[Bin(13, 0.9) >= 8] = 0.9991; P[Bin(12, 0.9) >= 8] = 0.9957 is too little."""
    assert num_to_ask(10, 8, drop_rate=0.0, available=100) == 13


def test_nobody_asks_more_than_there_are() -> None:
    """Whatever the drop rate says, even that nobody ever answers."""
    assert num_to_ask(10, 8, drop_rate=0.3, available=11) == 11
    assert num_to_ask(10, 8, drop_rate=1.0, available=40) == 40
    assert num_to_ask(3, 3, drop_rate=0.0, available=3) == 3


def test_a_fleet_of_thousands_is_sized_too() -> None:
    """C(2000, 1600) has 435 digits, too many for a float; with 10 % drops 2,000 of a goal of 2,000 reach 1,600."""
    assert math.comb(2000, 1600) > 10**308
    assert num_to_ask(2000, 1600, drop_rate=0.1, available=5000) == 2000
    n = num_to_ask(1500, 1500, drop_rate=0.3, available=5000)
    assert _tail(1500, n, Fraction(3, 10)) >= Fraction(999, 1000) > _tail(1500, n - 1, Fraction(3, 10))


@pytest.mark.parametrize(
    ("available", "fraction", "minimum", "expected"),
    [
        (10, 1.0, 1, (10, 8)),
        (10, 0.3, 1, (3, 2)),  # 0.3 * 10 is 3, not 2.999...; 0.8 * 3 = 2.4
        (10, 0.3, 5, (5, 5)),  # the minimum is wanted and needed
        (3, 1.0, 1, (3, 2)),
        (1, 0.1, 1, (1, 1)),
        (5, 1.0, 1, (5, 4)),
        (2, 0.5, 3, (2, 2)),  # fewer than the minimum: the machine waits, the numbers still make sense
    ],
)
def test_goal_and_quorum(available: int, fraction: float, minimum: int, expected: tuple[int, int]) -> None:
    """A share of those that are there, at least the minimum; four fifths of it count."""
    assert goal_and_quorum(available, fraction=fraction, minimum=minimum) == expected


def test_a_choice_follows_from_its_seed_alone() -> None:
    """Not from the order of the names; another seed chooses others."""
    names = [f"d{i}" for i in range(40)]
    first = choose(names, 10, seed=3)
    assert first == choose(names[::-1], 10, seed=3)
    assert first == sorted(set(first))
    assert set(first) <= set(names)
    assert first != choose(names, 10, seed=4)
    assert choose(names, 40, seed=1) == sorted(names)
