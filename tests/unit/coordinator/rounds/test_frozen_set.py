"""The set of updates that a version is made from: its order, its hash, and its weights."""

from __future__ import annotations

import pytest
from rows import digest, round_row, update_row

from coordinator.rounds.frozen_set import counted_samples, fold_of


def test_the_set_is_sorted_by_device_and_its_hash_is_that_of_its_lines() -> None:
    """b arrived first; derived here: SHA-256 of `device hash samples` per line."""
    a, b = update_row("a", num_samples=3), update_row("b", num_samples=5)
    fold = fold_of(round_row(), [b, a])
    assert fold.updates == (a, b)
    assert fold.set_hash == digest(f"a {a.sha256} 3\nb {b.sha256} 5\n")


@pytest.mark.parametrize(
    ("claimed", "counted"),
    [
        ([5, 20, 40], [5, 20, 40]),  # lower median 20, at most 200
        ([5, 20, 10**7], [5, 20, 200]),
        ([1, 10**7], [1, 10]),  # of two the smaller one is the median
        ([7], [7]),
        ([3, 3, 29, 31], [3, 3, 29, 30]),
    ],
)
def test_a_device_counts_for_ten_medians_at_most(claimed: list[int], counted: list[int]) -> None:
    """Below that, FedAvg is exactly the mean over samples; a lie of ten million is not the whole model."""
    updates = [update_row(f"d{i}", f"l{i}", num_samples=samples) for i, samples in enumerate(claimed)]
    assert counted_samples(updates, 10) == counted
