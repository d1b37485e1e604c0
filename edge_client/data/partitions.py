"""One data set into the parts of several devices: disjoint, complete, the same on every machine.

Covers: IID, and the label-skewed Dirichlet partition of NIID-Bench (Li et al., ICDE 2022), as most papers do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import InputError

__all__ = ["dirichlet", "iid"]

Indices = NDArray[np.int64]

_MAX_TRIES = 1000


def iid(labels: Indices, num_parts: int, seed: int) -> list[Indices]:
    """Equal random parts (sizes differ by one at most), each in ascending order."""
    _check_parts(num_parts, len(labels), 1)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, num_parts)]


def dirichlet(labels: Indices, num_parts: int, alpha: float, seed: int, min_size: int = 10) -> list[Indices]:
    """Parts whose class proportions are drawn from Dirichlet(alpha); a small alpha gives each part few classes.

    Drawn again, from the same generator, until every part has `min_size` samples.
    """
    _check_parts(num_parts, len(labels), min_size)
    rng = np.random.Generator(np.random.PCG64(seed))
    smallest = 0
    for _ in range(_MAX_TRIES):
        parts = _draw(labels, num_parts, alpha, rng)
        size = min(len(part) for part in parts)
        if size >= min_size:
            return parts
        smallest = max(smallest, size)
    raise InputError(
        f"dirichlet:{alpha:g} gave one of {num_parts} parts fewer than {min_size} samples in {_MAX_TRIES} tries "
        f"(at best {smallest} of {len(labels)} in all); use a larger alpha, fewer parts, or iid"
    )


def _draw(labels: Indices, num_parts: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    pieces: list[list[Indices]] = [[] for _ in range(num_parts)]
    sizes = np.zeros(num_parts, dtype=np.int64)
    fair_share = len(labels) / num_parts
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        proportions = _normalised(rng.dirichlet(np.full(num_parts, alpha)), sizes < fair_share)
        cuts = (np.cumsum(proportions)[:-1] * len(members)).astype(np.int64)
        for part, piece in enumerate(np.split(members, cuts)):
            pieces[part].append(piece)
            sizes[part] += len(piece)
    return [np.sort(np.concatenate(part)) for part in pieces]


def _normalised(proportions: NDArray[np.float64], has_room: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Zero for those that hold their fair share already; the rest sums to one."""
    kept = proportions * has_room
    if kept.sum() <= 0:  # a tiny alpha underflows: what is left goes in equal parts to those with room
        kept = has_room.astype(np.float64)
    shares: NDArray[np.float64] = kept / kept.sum()
    return shares


def _check_parts(num_parts: int, num_samples: int, min_size: int) -> None:
    if num_parts < 1:
        raise InputError(f"expected at least one part, got {num_parts}")
    if num_samples < num_parts * min_size:
        raise InputError(
            f"{num_samples} samples cannot make {num_parts} parts of at least {min_size}; "
            f"use at most {max(1, num_samples // min_size)} parts"
        )
