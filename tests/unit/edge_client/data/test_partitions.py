"""Partitions against independent implementations of their rules, and what cannot be divided."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.data import partitions
from edge_client.data.registry import Partition, parse_partition
from edge_client.errors import InputError

LABELS = np.repeat(np.arange(10), 100)


def _equal(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return [part.tolist() for part in first] == [part.tolist() for part in second]


@pytest.mark.parametrize("labels", [LABELS, np.random.default_rng(3).integers(0, 7, 500)], ids=["even", "uneven"])
def test_dirichlet_follows_the_recipe_of_niid_bench(labels: np.ndarray) -> None:
    """An independent transcription of the published recipe, with our generator and order of draws."""
    rng = np.random.Generator(np.random.PCG64(11))
    n, k = len(labels), 4
    while True:
        batches: list[list[int]] = [[] for _ in range(k)]
        for c in range(labels.max() + 1):
            idx_c = rng.permutation(np.flatnonzero(c == labels))
            p = rng.dirichlet(np.repeat(0.5, k))
            p = np.array([p_j * (len(b) < n / k) for p_j, b in zip(p, batches, strict=True)])
            p = p / p.sum()
            cuts = (np.cumsum(p) * len(idx_c)).astype(int)[:-1]
            batches = [b + piece.tolist() for b, piece in zip(batches, np.split(idx_c, cuts), strict=True)]
        if min(map(len, batches)) >= 10:
            break
    parts = partitions.dirichlet(labels, k, 0.5, 11)
    assert [part.tolist() for part in parts] == [sorted(b) for b in batches]


def test_dirichlet_is_drawn_again_until_every_device_has_ten() -> None:
    """With alpha 0.1 on 20 devices most draws leave someone below 10: the transcription needs more than one."""
    rng = np.random.Generator(np.random.PCG64(1))
    tries = 0
    sizes = np.zeros(20)
    while sizes.min() < 10:
        tries += 1
        sizes = np.zeros(20)
        for _ in range(10):
            rng.permutation(100)
            p = rng.dirichlet(np.repeat(0.1, 20)) * (sizes < 50)
            sizes += np.diff((np.cumsum(p / p.sum())[:-1] * 100).astype(int), prepend=0, append=100)
    assert tries > 1
    assert [len(part) for part in partitions.dirichlet(LABELS, 20, 0.1, 1)] == sizes.tolist()


def test_balanced_dirichlet_takes_turns() -> None:
    """Turn by turn in plain Python, with the same draws: a class that has run out is drawn again after the others."""
    labels, k = np.random.default_rng(5).integers(0, 4, 90), 7
    rng = np.random.Generator(np.random.PCG64(2))
    shuffled = rng.permutation(90)
    pool = {c: [int(i) for i in shuffled if labels[i] == c] for c in range(4)}
    proportions = rng.dirichlet(np.full(4, 0.3), size=k)
    turns = list(rng.permutation(np.arange(90) % k))
    expected: list[list[int]] = [[] for _ in range(k)]
    while turns:
        open_classes = {c for c in range(4) if pool[c]}
        waiting = []
        for device, u in zip(turns, rng.random(len(turns)), strict=True):
            weights = [p if c in open_classes else 0.0 for c, p in enumerate(proportions[device])]
            steps = np.cumsum(np.array(weights) / sum(weights))
            drawn = int(np.flatnonzero(u < steps)[0])
            if pool[drawn]:
                expected[device].append(pool[drawn].pop(0))
            else:
                waiting.append(device)
        turns = waiting
    parts = partitions.balanced_dirichlet(labels, k, 0.3, 2)
    assert [part.tolist() for part in parts] == [sorted(part) for part in expected]


def test_balanced_dirichlet_skews_and_evens_out() -> None:
    """Share of the most frequent of 10 labels: 0.1 when alpha is huge, close to 1 when it is tiny."""

    def largest_share(alpha: float) -> float:
        parts = partitions.balanced_dirichlet(LABELS, 10, alpha, 3)
        return float(np.mean([np.bincount(LABELS[p], minlength=10).max() / len(p) for p in parts]))

    assert largest_share(1e6) < 0.2
    assert largest_share(0.01) > 0.6


@pytest.mark.parametrize(("num_parts", "num_labels"), [(100, 2), (100, 5), (20, 1), (4, 10)])
def test_pathological_gives_equal_classes_equal_shards(num_parts: int, num_labels: int) -> None:
    """FeDepth's 100 devices of 1,000 samples with 2 labels: 200 shards, 20 per class, 5 samples each, 10 per device."""
    parts = partitions.pathological(LABELS, num_parts, num_labels, 4)
    assert {len(part) for part in parts} == {1000 // num_parts}
    counts = np.array([np.bincount(LABELS[part], minlength=10) for part in parts])
    assert {len(row[row > 0]) for row in counts} == {num_labels}
    assert set(counts[counts > 0].tolist()) == {1000 // (num_parts * num_labels)}


def test_pathological_gives_a_large_class_more_devices() -> None:
    """Classes of 600, 300, 100 for 5 devices of 2 labels: one shard each, and 7 more where they stay the largest.

    By hand: class 0 down to 300, 200, 150, class 1 to 150, class 0 to 120 (one per device), class 1 to 100 and 75.
    """
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    parts = partitions.pathological(labels, 5, 2, 1)
    counts = np.array([np.bincount(labels[part], minlength=3) for part in parts])
    assert (counts > 0).sum(axis=0).tolist() == [5, 4, 1]
    assert sorted(counts[:, 0].tolist()) == [120] * 5
    assert sorted(counts[:, 1].tolist()) == [0, 75, 75, 75, 75]


def test_keys_stay_together_in_their_order() -> None:
    """As many devices as persons: device i has the i-th; fewer devices: groups, whose numbers differ by one at most."""
    keys = np.array(["eve", "ann", "bob", "ann", "eve", "dan"])
    assert [part.tolist() for part in partitions.by_key(keys, 4, 1)] == [[1, 3], [2], [5], [0, 4]]
    groups = partitions.by_key(keys, 3, 1)
    assert sorted(len(set(keys[part])) for part in groups) == [1, 1, 2]
    assert sorted(np.concatenate(groups).tolist()) == list(range(6))
    assert _equal(groups, partitions.by_key(keys, 3, 1))


def test_other_samples_are_divided_alike() -> None:
    """Device 0 has 3/4 of class 0 and nothing of class 1: of 8 and 4 others it gets 6 and 0; class 2 is new: halves."""
    labels = np.array([0, 0, 0, 0, 1, 1])
    parts = [np.array([0, 1, 2]), np.array([3, 4, 5])]
    others = np.repeat([0, 1, 2], [8, 4, 6])
    shares = partitions.alike(parts, labels, others, 1)
    assert [np.bincount(others[share], minlength=3).tolist() for share in shares] == [[6, 0, 3], [2, 4, 3]]
    assert sorted(np.concatenate(shares).tolist()) == list(range(18))


def test_the_seed_decides_and_alpha_skews() -> None:
    """The same seed gives the same parts; a small alpha leaves parts with fewer classes than a large one."""
    first, again = (partitions.dirichlet(LABELS, 4, 0.1, 3) for _ in range(2))
    assert _equal(first, again)
    assert not np.array_equal(first[0], partitions.dirichlet(LABELS, 4, 0.1, 4)[0])

    def largest_share(alpha: float) -> float:
        parts = partitions.dirichlet(LABELS, 4, alpha, 3)
        return float(np.mean([np.bincount(LABELS[p], minlength=10).max() / len(p) for p in parts]))

    assert largest_share(0.1) > 2 * largest_share(1000.0)


@pytest.mark.parametrize(
    ("text", "num_samples", "num_parts", "message"),
    [
        ("iid", 5, 8, "'iid': 5 samples cannot be divided among 8 devices with at least 1 each; use at most 5 devices"),
        ("iid", 5, 0, "expected at least one device, got 0"),
        ("dirichlet:0.5", 30, 4, "30 samples .* 4 devices with at least 10 each; use at most 3 devices"),
        ("dirichlet:0.01", 40, 4, "fewer than 10 of 40 samples .* 'balanced-dirichlet:0.01' or 'iid'"),
        ("balanced-dirichlet:1", 3, 4, "'balanced-dirichlet:1': 3 samples .* use at most 3 devices"),
        ("pathological:2", 9, 5, "9 samples .* 5 devices with at least 2 each; use at most 4 devices"),
        ("pathological:4", 30, 2, "3 labels of 30 samples for 2 devices: .* use at most 'pathological:3'"),
        ("pathological:1", 30, 2, "2 shards leave labels without a device; use at least 3 devices or 'pathological:2'"),
        ("key", 30, 5, "30 samples of 4 different keys cannot be divided among 5 devices; use at most 4 devices"),
    ],
)
def test_what_cannot_be_divided_says_what_would_work(text: str, num_samples: int, num_parts: int, message: str) -> None:
    """The message names the partition, the devices and the samples."""
    labels, keys = np.arange(num_samples) % 3, np.arange(num_samples) % 4
    with pytest.raises(InputError, match=rf"partition .*{message}"):
        partitions.make(parse_partition(text), labels, keys, num_parts, 1)


def test_labels_too_rare_for_their_devices_are_refused() -> None:
    """Two labels per device need 8 shards; class 1 has one sample, class 0 one shard per device: 5 in all."""
    labels = np.array([0] * 20 + [1])
    with pytest.raises(InputError, match=r"fewer samples than devices that need them; use at most 'pathological:1'"):
        partitions.pathological(labels, 4, 2, 1)


@pytest.mark.parametrize(
    ("text", "partition"),
    [
        ("", Partition(kind="iid")),
        ("iid", Partition(kind="iid")),
        ("dirichlet:0.5", Partition(kind="dirichlet", value=0.5)),
        ("balanced-dirichlet:1e-3", Partition(kind="balanced-dirichlet", value=0.001)),
        ("pathological:2", Partition(kind="pathological", value=2.0)),
        ("key", Partition(kind="key")),
        ("key:a b", Partition(kind="key", name="a b")),
        ("file:/x:y.npz", Partition(kind="file", name="/x:y.npz")),
    ],
)
def test_partitions_are_written_as_texts(text: str, partition: Partition) -> None:
    """One word, or a word and its value."""
    assert parse_partition(text) == partition


@pytest.mark.parametrize(
    "text",
    [
        *("dirichlet", "dirichlet:0", "dirichlet:nan", "dirichlet:inf", "balanced-dirichlet:-1", "pathological:0"),
        *("pathological:1.5", "pathological:", "pathological:²", "key:", "file:", "file", "iid:3", "shards", "IID"),
    ],
)
def test_other_texts_are_refused_with_what_was_expected(text: str) -> None:
    """The message has the text."""
    with pytest.raises(InputError) as caught:
        parse_partition(text)
    assert "expected" in str(caught.value)
    assert repr(text) in str(caught.value)
