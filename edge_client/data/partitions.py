"""One data set into the parts of several devices: disjoint, complete, the same on every machine.

    iid                 equal random parts
    dirichlet           label skew of NIID-Bench (Li et al., ICDE 2022): sizes differ, too
    balanced_dirichlet  label skew in equal sizes (Acar et al., ICLR 2021; FeDepth's alpha)
    pathological        so many labels per part, in shards of one label (McMahan et al., AISTATS 2017; FeDepth's beta)
    by_key              each person's or site's samples stay together

All follow from the labels (or keys), the number of parts and the seed alone: whoever asks for a part computes the same
whole. Does not cover: how a partition is written (`registry.parse_partition`), data that is divided already.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.data.registry import Partition
from edge_client.errors import InputError

__all__ = ["alike", "balanced_dirichlet", "by_key", "dirichlet", "iid", "make", "parts_of", "pathological"]

Indices = NDArray[np.int64]

_MAX_TRIES = 1000
_MIN_SIZE = 10  # of a part of `dirichlet`, as NIID-Bench has it


def make(partition: Partition, labels: Indices, keys: NDArray[Any] | None, num_parts: int, seed: int) -> list[Indices]:
    """The parts that `partition` names, each in ascending order; raises `InputError` for what cannot be divided so."""
    if partition.kind == "key":
        if keys is None:
            raise ValueError("a partition by key needs the keys of the samples")
        return by_key(keys, num_parts, seed)
    if partition.kind == "dirichlet":
        return dirichlet(labels, num_parts, partition.value, seed)
    if partition.kind == "balanced-dirichlet":
        return balanced_dirichlet(labels, num_parts, partition.value, seed)
    if partition.kind == "pathological":
        return pathological(labels, num_parts, int(partition.value), seed)
    return iid(labels, num_parts, seed)


def iid(labels: Indices, num_parts: int, seed: int, min_size: int = 1) -> list[Indices]:
    """Equal random parts (sizes differ by one at most)."""
    _check_parts("iid", num_parts, len(labels), min_size)
    order = _generator(seed).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, num_parts)]


def dirichlet(labels: Indices, num_parts: int, alpha: float, seed: int, min_size: int = _MIN_SIZE) -> list[Indices]:
    """Each class is divided in proportions drawn from Dirichlet(alpha); a small alpha gives each part few classes.

    Parts that hold their fair share already get no more of the further classes. Drawn again, from the same generator,
    until every part has `min_size` samples.
    """
    name = f"dirichlet:{alpha:g}"
    _check_parts(name, num_parts, len(labels), min_size)
    rng = _generator(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    smallest = 0
    for _ in range(_MAX_TRIES):
        draws = _draw(members, num_parts, alpha, rng)
        size = int(np.sum([sizes for _, sizes in draws], axis=0).min())
        if size >= min_size:
            owner = np.empty(len(labels), dtype=np.int64)
            for order, sizes in draws:
                owner[order] = np.repeat(np.arange(num_parts), sizes)
            return parts_of(owner, num_parts)
        smallest = max(smallest, size)
    raise InputError(
        f"partition {name!r}: one of {num_parts} devices got fewer than {min_size} of {len(labels)} samples in each of "
        f"{_MAX_TRIES} tries (at best {smallest}); use a larger alpha, fewer devices, 'balanced-dirichlet:{alpha:g}' "
        "or 'iid'"
    )


def _draw(
    members: Sequence[Indices], num_parts: int, alpha: float, rng: np.random.Generator
) -> list[tuple[Indices, Indices]]:
    """For each class its samples in random order, and how many of them each part gets."""
    held = np.zeros(num_parts, dtype=np.int64)
    fair_share = sum(map(len, members)) / num_parts
    drawn = []
    for samples in members:
        order = rng.permutation(samples)
        proportions = _normalised(rng.dirichlet(np.full(num_parts, alpha)), held < fair_share)
        cuts = (np.cumsum(proportions)[:-1] * len(order)).astype(np.int64)
        sizes = np.diff(cuts, prepend=0, append=len(order))
        held += sizes
        drawn.append((order, sizes))
    return drawn


def _normalised(proportions: NDArray[np.float64], has_room: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Zero for those that hold their fair share already; the rest sums to one."""
    weights = proportions * has_room
    if weights.sum() <= 0:  # a tiny alpha underflows: what is left goes in equal parts to those with room
        weights = has_room.astype(np.float64)
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def balanced_dirichlet(labels: Indices, num_parts: int, alpha: float, seed: int) -> list[Indices]:
    """Equal parts (sizes differ by one at most), each with class proportions of its own from Dirichlet(alpha).

    The parts take turns in random order; each turn draws a class by the part's proportions and takes one sample of it.
    Turns whose class has run out draw again among the classes that are left, after the others.
    """
    _check_parts(f"balanced-dirichlet:{alpha:g}", num_parts, len(labels), 1)
    rng = _generator(seed)
    classes, numbers = np.unique(labels, return_inverse=True)
    left = np.bincount(numbers, minlength=len(classes))  # [C] samples that nobody has
    shuffled = rng.permutation(len(labels))
    pool = shuffled[np.argsort(numbers[shuffled], kind="stable")]  # class after class, random inside
    ends = np.cumsum(left)
    proportions = rng.dirichlet(np.full(len(classes), alpha), size=num_parts)  # [K, C]
    turns = rng.permutation(np.arange(len(labels)) % num_parts)  # [n] whose turn it is
    owner = np.empty(len(labels), dtype=np.int64)
    while len(turns):  # once per class at most: whoever has to wait has emptied one
        drawn = _draw_classes(proportions, left, turns, rng)
        rank = _rank_in_class(drawn, len(classes))
        served = rank < left[drawn]
        owner[pool[(ends - left)[drawn[served]] + rank[served]]] = turns[served]
        left = np.maximum(left - np.bincount(drawn, minlength=len(classes)), 0)
        turns = turns[~served]
    return parts_of(owner, num_parts)


def _draw_classes(proportions: NDArray[np.float64], left: Indices, turns: Indices, rng: np.random.Generator) -> Indices:
    """A class for each turn, by the proportions of the part whose turn it is, among the classes that are left."""
    weights = proportions * (left > 0)
    weights[weights.sum(axis=1) <= 0] = left  # nothing is left of a part's own classes
    num_classes = len(left)
    # all parts' distribution functions one after another, part k from k to k + 1: one search for all turns
    steps = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1) + np.arange(len(weights))[:, None]
    drawn_class = np.searchsorted(steps.ravel(), turns + rng.random(len(turns)), side="right") - turns * num_classes
    last = num_classes - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)  # rounding must not lead beyond
    drawn: Indices = np.minimum(drawn_class, last[turns])
    return drawn


def _rank_in_class(drawn: Indices, num_classes: int) -> Indices:
    """How many before it drew the same class."""
    order = np.argsort(drawn, kind="stable")
    counts = np.bincount(drawn, minlength=num_classes)
    rank = np.empty(len(drawn), dtype=np.int64)
    rank[order] = np.arange(len(drawn)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def pathological(labels: Indices, num_parts: int, num_labels: int, seed: int) -> list[Indices]:
    """Each part gets shards of `num_labels` different labels; a class has shards by its size, all of them equal."""
    name = f"pathological:{num_labels}"
    _check_parts(name, num_parts, len(labels), num_labels)
    rng = _generator(seed)
    classes, numbers, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shards = _shards(name, counts, num_parts, num_labels)
    owner = np.empty(len(labels), dtype=np.int64)
    dealt = _deal(shards, num_parts, num_labels, rng)
    for number in range(len(classes)):
        samples = rng.permutation(np.flatnonzero(numbers == number))
        holders = rng.permutation(np.flatnonzero(dealt[:, number]))
        owner[samples] = holders[np.sort(np.arange(len(samples)) % len(holders))]
    return parts_of(owner, num_parts)


def _shards(name: str, counts: Indices, num_parts: int, num_labels: int) -> Indices:
    """Shards of each class: one at least, one per part and per sample at most, the largest are halved first."""
    num_classes, total = len(counts), num_parts * num_labels
    caps = np.minimum(counts, num_parts)
    what = f"partition {name!r}: {len(counts)} labels of {int(counts.sum())} samples for {num_parts} devices"
    if num_labels > num_classes:
        raise InputError(f"{what}: a device cannot have {num_labels} labels; use at most 'pathological:{num_classes}'")
    if total < num_classes:
        few = -(-num_classes // num_labels)
        raise InputError(
            f"{what}: {total} shards leave labels without a device; use at least {few} devices or "
            f"'pathological:{-(-num_classes // num_parts)}'"
        )
    if int(caps.sum()) < total:
        raise InputError(
            f"{what}: some labels have fewer samples than devices that need them; use at most "
            f"'pathological:{int(caps.sum()) // num_parts}' or fewer devices"
        )
    shards = np.ones(num_classes, dtype=np.int64)
    heap = [(-float(counts[c]) / 2, c) for c in range(num_classes) if caps[c] > 1]  # size of a shard after the next cut
    heapq.heapify(heap)
    for _ in range(total - num_classes):
        _, c = heapq.heappop(heap)
        shards[c] += 1
        if shards[c] < caps[c]:
            heapq.heappush(heap, (-float(counts[c]) / (int(shards[c]) + 1), c))
    return shards


def _deal(shards: Indices, num_parts: int, num_labels: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """[parts, classes] who gets a shard of what: at random, but `num_labels` different ones each."""
    left = shards.copy()
    dealt = np.zeros((num_parts, len(shards)), dtype=np.bool_)
    for part in range(num_parts):
        # weighted draw without replacement: the largest of u^(1/weight)
        with np.errstate(divide="ignore"):
            lot = np.log(rng.random(len(left))) / left
        lot[left == num_parts - part] = np.inf  # as many shards as parts that are left: each must have one
        taken = np.argsort(lot)[-num_labels:]
        dealt[part, taken] = True
        left[taken] -= 1
    return dealt


def by_key(keys: NDArray[Any], num_parts: int, seed: int) -> list[Indices]:
    """All samples of a key in one part: as many keys as parts in their order, more in random groups of equal number."""
    distinct_keys, numbers = np.unique(keys, return_inverse=True)
    num_keys = len(distinct_keys)
    if num_parts < 1 or num_keys < num_parts:
        raise InputError(
            f"partition 'key': {len(keys)} samples of {num_keys} different keys cannot be divided among {num_parts} "
            f"devices; use {'at most ' if num_keys > 1 else ''}{max(1, num_keys)} devices"
        )
    order = np.arange(num_keys) if num_keys == num_parts else _generator(seed).permutation(num_keys)
    part_of_key = np.empty(num_keys, dtype=np.int64)
    for part, group in enumerate(np.array_split(order, num_parts)):
        part_of_key[group] = part
    return parts_of(part_of_key[numbers.reshape(-1)], num_parts)


def alike(parts: Sequence[Indices], labels: Indices, others: Indices, seed: int) -> list[Indices]:
    """Parts of other samples (with labels `others`) in the proportions that each class of `labels` has in `parts`.

    A class that no part has goes in equal shares to all. A part may stay empty.
    """
    rng = _generator(seed)
    owner = np.empty(len(others), dtype=np.int64)
    num_classes = int(max(labels.max(initial=0), others.max(initial=0))) + 1
    counts = np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts])  # [K, C]
    for label in np.unique(others):
        order = rng.permutation(np.flatnonzero(others == label))
        shares = np.cumsum(counts[:, label] if counts[:, label].any() else np.ones_like(counts[:, label]))
        cuts = shares * len(order) // shares[-1]
        owner[order] = np.repeat(np.arange(len(parts)), np.diff(cuts, prepend=0))
    return parts_of(owner, len(parts))


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def parts_of(owner: Indices, num_parts: int) -> list[Indices]:
    """The samples of each part, ascending, from each sample's part."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=num_parts)).tolist()
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _check_parts(name: str, num_parts: int, num_samples: int, min_size: int) -> None:
    if num_parts < 1:
        raise InputError(f"partition {name!r}: expected at least one device, got {num_parts}")
    if num_samples < num_parts * min_size:
        raise InputError(
            f"partition {name!r}: {num_samples} samples cannot be divided among {num_parts} devices with at least "
            f"{min_size} each; use at most {max(1, num_samples // max(1, min_size))} devices"
        )
