"""Who takes part in a round: how many are needed, how many to ask, which, and with which seeds."""

from __future__ import annotations

import bisect
import hashlib
import math
import random
from collections.abc import Sequence

__all__ = ["choose", "goal_and_quorum", "num_to_ask", "seed_of"]

_CONFIDENCE = 0.999
_LEAST_DROP_RATE = 0.1  # a fleet that has not failed yet will


def seed_of(seed: int, round_: int, device: str) -> int:
    """The seed of a device's work in a round: the same in every attempt."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{round_}/{device}".encode()).digest()[:8], "big") >> 1


def goal_and_quorum(available: int, *, fraction: float, minimum: int) -> tuple[int, int]:
    """How many updates a round wants, and with how many it counts: rounded down, so that one of three may fail."""
    goal = min(available, max(minimum, math.floor(fraction * available + 1e-9)))
    return goal, min(goal, max(minimum, math.floor(0.8 * goal + 1e-9)))


def num_to_ask(goal: int, quorum: int, *, drop_rate: float, available: int) -> int:
    """The smallest n >= goal with P[Bin(n, 1 - p) >= quorum] >= 0.999, at most all that are there."""
    drop = max(drop_rate, _LEAST_DROP_RATE)
    if drop >= 1:
        return available
    asked = range(goal, max(goal, available))  # the more are asked, the likelier it is: halving finds the smallest
    return goal + bisect.bisect_left(asked, _CONFIDENCE, key=lambda n: _at_least(quorum, n, drop))


def _at_least(quorum: int, n: int, drop: float) -> float:
    """P[Bin(n, 1 - drop) >= quorum], in logarithms: the coefficients of a fleet of 1,500 are no float any more."""
    log_keep, log_drop, whole = math.log1p(-drop), math.log(drop), math.lgamma(n + 1)
    return math.fsum(
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log_keep + (n - k) * log_drop)
        for k in range(quorum, n + 1)
    )


def choose(names: Sequence[str], num: int, *, seed: int) -> list[str]:
    """`num` of the names, without repetition; the same for the same seed whatever their order was."""
    return sorted(random.Random(seed).sample(sorted(names), num))
