"""Partitions: disjoint, complete, deterministic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.data import partitions
from edge_client.errors import InputError

LABELS = np.repeat(np.arange(10), 100)


def _check_cover(parts: list[np.ndarray], num_samples: int) -> None:
    together = np.concatenate(parts)
    assert np.array_equal(np.sort(together), np.arange(num_samples))


@given(num_samples=st.integers(1, 300), num_parts=st.integers(1, 20), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_iid_parts_cover_everything_once_in_equal_sizes(num_samples: int, num_parts: int, seed: int) -> None:
    """Sizes differ by one at most."""
    if num_samples < num_parts:
        return
    parts = partitions.iid(np.zeros(num_samples, dtype=np.int64), num_parts, seed)
    _check_cover(parts, num_samples)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(alpha=st.sampled_from([0.1, 0.5, 1.0, 100.0]), num_parts=st.integers(1, 10), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_dirichlet_parts_cover_everything_once_with_at_least_ten_each(alpha: float, num_parts: int, seed: int) -> None:
    """Whatever alpha and seed."""
    parts = partitions.dirichlet(LABELS, num_parts, alpha, seed)
    _check_cover(parts, len(LABELS))
    assert min(map(len, parts)) >= 10


def test_dirichlet_follows_the_recipe_of_niid_bench() -> None:
    """An independent transcription of the published recipe, with our generator and order of draws."""
    rng = np.random.Generator(np.random.PCG64(11))
    n, k = len(LABELS), 4
    while True:
        batches: list[list[int]] = [[] for _ in range(k)]
        for c in range(10):
            idx_c = rng.permutation(np.flatnonzero(c == LABELS))
            p = rng.dirichlet(np.repeat(0.5, k))
            p = np.array([p_j * (len(b) < n / k) for p_j, b in zip(p, batches, strict=True)])
            p = p / p.sum()
            cuts = (np.cumsum(p) * len(idx_c)).astype(int)[:-1]
            batches = [b + piece.tolist() for b, piece in zip(batches, np.split(idx_c, cuts), strict=True)]
        if min(map(len, batches)) >= 10:
            break
    parts = partitions.dirichlet(LABELS, k, 0.5, 11)
    assert [part.tolist() for part in parts] == [sorted(b) for b in batches]


def test_the_seed_decides_and_alpha_skews() -> None:
    """The same seed gives the same parts; a small alpha leaves parts with fewer classes than a large one."""
    first, again = (partitions.dirichlet(LABELS, 4, 0.1, 3) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], partitions.dirichlet(LABELS, 4, 0.1, 4)[0])

    def largest_share(alpha: float) -> float:
        parts = partitions.dirichlet(LABELS, 4, alpha, 3)
        return float(np.mean([np.bincount(LABELS[p], minlength=10).max() / len(p) for p in parts]))

    assert largest_share(0.1) > 2 * largest_share(1000.0)


def test_what_cannot_be_cut_says_what_would_work() -> None:
    """30 samples cannot make four parts of ten; 40 samples with a tiny alpha never come out even."""
    with pytest.raises(InputError, match="at most 3 devices"):
        partitions.dirichlet(np.zeros(30, dtype=np.int64), 4, 0.5, 1)
    with pytest.raises(InputError, match=r"larger alpha, fewer devices, 'balanced-dirichlet:0.01' or 'iid'"):
        partitions.dirichlet(np.zeros(40, dtype=np.int64), 4, 0.01, 1)
