"""The updates that a new version is made from: in which order, under which hash, and with which weights."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Sequence

from coordinator.rounds.instructions import Fold
from coordinator.store.rows import RoundRow, UpdateRow

__all__ = ["capped", "counted_samples", "fold_of"]


def fold_of(round_: RoundRow, updates: Iterable[UpdateRow]) -> Fold:
    """The updates of a round sorted by device, and the hash of their lines `device sha256 num_samples`."""
    frozen = tuple(sorted(updates, key=lambda update: update.device))
    lines = "".join(f"{u.device} {u.sha256} {u.num_samples}\n" for u in frozen)
    return Fold(round_, frozen, hashlib.sha256(lines.encode()).hexdigest())


def counted_samples(updates: Sequence[UpdateRow], max_weight_ratio: int) -> list[int]:
    """The weight of each update: its number of samples, at most the ratio times their lower median.

    Devices report their own number of samples; without a bound, one lie would make its update the whole model.
    """
    return capped([update.num_samples for update in updates], max_weight_ratio)


def capped(num_samples: Sequence[int], max_ratio: int) -> list[int]:
    """Each number, at most the ratio times their lower median."""
    most = max_ratio * statistics.median_low(num_samples) if num_samples else 0
    return [min(num, most) for num in num_samples]
