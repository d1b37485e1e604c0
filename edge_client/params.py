"""Maths on tensors of a model: the coverage mean, sums of squares, and what happens to the buffers of a BatchNorm.

The coverage mean is the one aggregation primitive: for each element e of the server's tensor

    new(e) = sum_k m_k x_k(e) / sum_k m_k    over the uploads k that cover e;  nobody covers e: the old value stays

summed in float64 in the order given and cast once, so that equal uploads come back bit for bit and the same uploads in
the same order (callers sort by device) always give the same bits.

Buffers: running_mean and running_var are averaged like parameters, num_batches_tracked (integer) is the largest one,
and a running_var that a delta pushed below zero becomes zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = [
    "IndexMap",
    "Part",
    "coverage_mean",
    "coverage_sum",
    "inner_product",
    "is_buffer",
    "settle_buffer",
    "square_sum",
]

IndexMap = tuple[Tensor, ...]  # one int64 vector of distinct indices per axis of the server's tensor
Part = tuple[Tensor, IndexMap | None, float]  # upload, its place (None: all of the tensor), its weight

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

# Mixed-type arithmetic makes a float64 copy of its float32 operand. Pieces keep that copy in the cache, and one scratch
# tensor spares the page faults of making it anew: 4.9 GB/s of float32 absorbed per core, against 0.9 GB/s without.
_PIECE = 1 << 16


def coverage_mean(old: Tensor, parts: Iterable[Part]) -> Tensor:
    """Weighted mean of the uploads that cover each element of `old`; integer tensors: the largest value.

    `parts` is read once and one at a time; parts of weight 0 count for nothing.
    """
    counted = _checked(old, parts)
    if not old.is_floating_point():
        return _coverage_max(old, counted)
    total = torch.zeros(old.shape, dtype=torch.float64)
    full_weight = 0.0  # of the parts that cover everything
    part_weight: Tensor | None = None  # per element, of the others
    for x, index_map, weight in counted:
        if index_map is None:
            _add_scaled(total, x, weight)
            full_weight += weight
            continue
        if part_weight is None:
            part_weight = torch.zeros(old.shape, dtype=torch.float64)
        place = _place(index_map)
        total[place] += x.to(torch.float64) * weight
        part_weight[place] += weight
    return _divide(old, total, full_weight, part_weight)


def _checked(old: Tensor, parts: Iterable[Part]) -> Iterator[Part]:
    for x, index_map, weight in parts:
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"expected a finite weight of 0 or more, got {weight!r}")
        expected = tuple(old.shape) if index_map is None else tuple(len(indices) for indices in index_map)
        if tuple(x.shape) != expected or (index_map is not None and len(index_map) != old.ndim):
            raise ValueError(f"part of shape {tuple(x.shape)} does not fit its place {expected} in {tuple(old.shape)}")
        if weight > 0:
            yield x, index_map, weight


def _add_scaled(total: Tensor, x: Tensor, weight: float) -> None:
    flat = total.view(-1)
    for start, piece in _pieces(x):
        flat[start : start + _PIECE].add_(piece, alpha=weight)


def _pieces(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Start and float64 copy of each piece of `x`; a copy lasts until the next one is asked for."""
    flat = x.reshape(-1)
    scratch = torch.empty(min(_PIECE, flat.numel()), dtype=torch.float64)
    for start in range(0, flat.numel(), _PIECE):
        source = flat[start : start + _PIECE]
        yield start, scratch[: source.numel()].copy_(source)


def _place(index_map: IndexMap) -> tuple[Tensor, ...]:
    """The outer product of the index vectors, as numpy's `ix_`: vector i is reshaped to axis i."""
    axes = range(len(index_map))
    return tuple(indices.view([-1 if axis == i else 1 for axis in axes]) for i, indices in enumerate(index_map))


def _divide(old: Tensor, total: Tensor, full_weight: float, part_weight: Tensor | None) -> Tensor:
    if part_weight is None:
        return total.div_(full_weight).to(old.dtype) if full_weight > 0 else old.clone()
    weight = part_weight.add_(full_weight)
    covered = weight > 0
    return torch.where(covered, total.div_(weight.masked_fill_(~covered, 1.0)).to(old.dtype), old)


def _coverage_max(old: Tensor, parts: Iterable[Part]) -> Tensor:
    largest = torch.full_like(old, torch.iinfo(old.dtype).min)
    covered = torch.zeros(old.shape, dtype=torch.bool)
    for x, index_map, _ in parts:
        place = ... if index_map is None else _place(index_map)
        largest[place] = torch.maximum(largest[place], x.to(old.dtype))
        covered[place] = True
    return torch.where(covered, largest, old)


def coverage_sum(shape: Sequence[int], parts: Iterable[tuple[IndexMap | None, float]]) -> Tensor:
    """For each element the sum of the weights that cover it, float64; [] if all of them cover everything."""
    everywhere = 0.0
    total: Tensor | None = None
    for index_map, weight in parts:
        if index_map is None:
            everywhere += weight
            continue
        if total is None:
            total = torch.zeros(tuple(shape), dtype=torch.float64)
        total[_place(index_map)] += weight
    return torch.tensor(everywhere, dtype=torch.float64) if total is None else total.add_(everywhere)


def is_buffer(name: str) -> bool:
    """Whether a tensor is one of a BatchNorm's that no gradient moves."""
    return name.rpartition(".")[2] in _BUFFERS


def settle_buffer(name: str, tensor: Tensor) -> Tensor:
    """`tensor` after a delta was added to it: a variance stays at zero or above. Changes `tensor` itself."""
    return tensor.clamp_(min=0) if name.rpartition(".")[2] == "running_var" else tensor


def inner_product(tensor: Tensor, other: Tensor) -> float:
    """Sum of the products of their elements, in float64."""
    return sum(float(torch.dot(a, b)) for (_, a), (_, b) in zip(_pieces(tensor), _pieces(other), strict=True))


def square_sum(tensor: Tensor, minus: Tensor | None = None) -> float:
    """Sum of squares of `tensor - minus` in float64; finite exactly if all values are: squares of float32 fit."""
    total = 0.0
    if minus is None:
        for _, piece in _pieces(tensor):
            total += float(torch.dot(piece, piece))
        return total
    for (_, piece), (_, base) in zip(_pieces(tensor), _pieces(minus), strict=True):
        piece.sub_(base)
        total += float(torch.dot(piece, piece))
    return total
