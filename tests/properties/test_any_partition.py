"""Any labels, any number of devices: every sample on exactly one device, the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.data import partitions
from edge_client.data.registry import parse_partition
from edge_client.errors import InputError

TEXTS = ["iid", "dirichlet:0.5", "balanced-dirichlet:0.1", "balanced-dirichlet:0.0001", "pathological:2", "key"]
SEEDS = st.integers(0, 2**31)


@st.composite
def labelled(draw: st.DrawFn) -> np.ndarray:
    """Labels with gaps and in any proportions, shuffled."""
    counts = draw(st.dictionaries(st.integers(0, 40), st.integers(1, 60), min_size=1, max_size=8))
    labels = np.repeat(list(counts), list(counts.values()))
    return np.random.default_rng(draw(SEEDS)).permutation(labels)


@pytest.mark.parametrize("text", TEXTS)
@given(labels=labelled(), num_parts=st.integers(1, 12), seed=SEEDS)
@settings(max_examples=40)
def test_every_sample_is_in_exactly_one_part(text: str, labels: np.ndarray, num_parts: int, seed: int) -> None:
    """None twice, none left, no part empty, each in ascending order; twice the same; or an input error."""
    keys = labels * 3 % 7
    try:
        parts, again = (partitions.make(parse_partition(text), labels, keys, num_parts, seed) for _ in range(2))
    except InputError:
        return
    assert len(parts) == num_parts
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all(len(part) and np.all(np.diff(part) > 0) for part in parts)
    assert all(np.array_equal(part, other) for part, other in zip(parts, again, strict=True))


@pytest.mark.parametrize("text", ["iid", "balanced-dirichlet:0.01", "balanced-dirichlet:1", "balanced-dirichlet:1000"])
@given(labels=labelled(), num_parts=st.integers(1, 12), seed=SEEDS)
@settings(max_examples=40)
def test_balanced_sizes_differ_by_one_at_most(text: str, labels: np.ndarray, num_parts: int, seed: int) -> None:
    """Whatever the classes; they divide whatever has a sample for each device."""
    if len(labels) >= num_parts:
        parts = partitions.make(parse_partition(text), labels, None, num_parts, seed)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(labels=labelled(), num_parts=st.integers(1, 12), num_labels=st.integers(1, 8), seed=SEEDS)
@settings(max_examples=150)
def test_pathological_parts_have_exactly_their_labels(
    labels: np.ndarray, num_parts: int, num_labels: int, seed: int
) -> None:
    """As many different labels as asked for, or an input error: if there are too few labels, or too few samples."""
    try:
        parts = partitions.pathological(labels, num_parts, num_labels, seed)
    except InputError:
        counts = np.unique(labels, return_counts=True)[1]
        room = np.minimum(counts, num_parts).sum()
        assert num_labels > len(counts) or num_parts * num_labels < len(counts) or room < num_parts * num_labels
        return
    assert {len(np.unique(labels[part])) for part in parts} == {num_labels}


@given(labels=labelled(), num_parts=st.integers(1, 12), seed=SEEDS)
@settings(max_examples=20)
def test_dirichlet_parts_have_ten_samples_at_least(labels: np.ndarray, num_parts: int, seed: int) -> None:
    """The rule of NIID-Bench."""
    try:
        parts = partitions.dirichlet(labels, num_parts, 0.5, seed)
    except InputError:
        return
    assert min(map(len, parts)) >= 10


@given(labels=labelled(), others=labelled(), num_parts=st.integers(1, 12), seed=SEEDS)
@settings(max_examples=60)
def test_other_samples_are_divided_once_each(labels: np.ndarray, others: np.ndarray, num_parts: int, seed: int) -> None:
    """Even if some parts get none of them."""
    if len(labels) >= num_parts:
        shares = partitions.alike(partitions.iid(labels, num_parts, seed), labels, others, seed)
        assert len(shares) == num_parts
        assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(len(others)))


@given(keys=st.lists(st.sampled_from("abcdef"), min_size=1), num_parts=st.integers(1, 6), seed=SEEDS)
def test_a_key_is_in_one_part(keys: list[str], num_parts: int, seed: int) -> None:
    """And a part of so many keys has them all."""
    if num_parts <= len(set(keys)):
        parts = partitions.by_key(np.array(keys), num_parts, seed)
        owners = [{keys[sample] for sample in part} for part in parts]
        assert sum(map(len, owners)) == len(set(keys))
        assert max(map(len, owners)) - min(map(len, owners)) <= 1
