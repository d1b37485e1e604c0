"""t-SNE (van der Maaten and Hinton, JMLR 2008): points of many dimensions in a plane, where neighbours stay close.

The exact algorithm, for the few hundred features of a report; the same bits for the same seed on the same machine.

    p_ij   symmetrised Gaussian similarities; each point's width by bisection, so that it has `perplexity` neighbours
    q_ij   Student similarities of the plane's points
    steps along the gradient of KL(P || Q) with momentum and gains, P exaggerated for the first quarter

Imports numpy. Does not cover: which features, and their picture (`report`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["neighbours", "tsne"]

Floats = NDArray[np.float64]

_TINY = 1e-12
_EXAGGERATION = 12.0
_LEAST_RATE = 5.0  # with 50, as is usual for thousands of points, single ones of a few dozen are thrown far out


def tsne(features: NDArray[np.floating], *, seed: int, perplexity: float = 30.0, steps: int = 500) -> Floats:
    """[n, d] -> [n, 2]; raises `ValueError` for fewer than four points, or values that are not finite."""
    x = np.asarray(features, dtype=np.float64)
    if x.ndim != 2 or len(x) < 4 or not np.isfinite(x).all():
        raise ValueError(f"expected four or more rows of finite numbers, got an array of shape {x.shape}")
    p = neighbours(x, min(perplexity, (len(x) - 1) / 3))
    rng = np.random.Generator(np.random.PCG64(seed))
    y = rng.normal(0.0, 1e-4, (len(x), 2))
    velocity, gains = np.zeros_like(y), np.ones_like(y)
    rate = max(_LEAST_RATE, len(x) / _EXAGGERATION)
    for step in range(steps):
        early = step < steps // 4
        gradient = _gradient(p * _EXAGGERATION if early else p, y)
        same = np.sign(gradient) == np.sign(velocity)
        gains = np.maximum(np.where(same, gains * 0.8, gains + 0.2), 0.01)
        velocity = (0.5 if early else 0.8) * velocity - rate * gains * gradient
        y = y + velocity
        y = y - y.mean(axis=0)
    return np.asarray(y, dtype=np.float64)


def _squared_distances(x: Floats) -> Floats:
    norms = (x * x).sum(axis=1)
    return np.asarray(np.maximum(norms[:, None] + norms[None, :] - 2 * x @ x.T, 0.0), dtype=np.float64)


def neighbours(x: Floats, perplexity: float) -> Floats:
    """P: [n, n], symmetric, zero on the diagonal, its sum is 1."""
    distances = _squared_distances(x)
    np.fill_diagonal(distances, np.inf)
    p = np.stack([_row(row, np.log(perplexity)) for row in distances])
    return np.maximum((p + p.T) / (2 * len(x)), _TINY) * (1 - np.eye(len(x)))


def _row(distances: Floats, entropy: float) -> Floats:
    """Similarities of one point to the others, with this entropy (in nats), by bisection of the width."""
    low, high, beta = 0.0, np.inf, 1.0
    shifted = distances - distances.min()  # exp of large numbers would vanish for all of them
    for _ in range(64):
        weights = np.exp(-shifted * beta)
        p = weights / weights.sum()
        current = -(p[p > 0] * np.log(p[p > 0])).sum()
        if abs(current - entropy) < 1e-6:
            break
        if current > entropy:
            low, beta = beta, beta * 2 if np.isinf(high) else (beta + high) / 2
        else:
            high, beta = beta, (beta + low) / 2
    return np.asarray(p, dtype=np.float64)


def _gradient(p: Floats, y: Floats) -> Floats:
    """4 sum_j (p_ij - q_ij) (y_i - y_j) / (1 + |y_i - y_j|^2)."""
    closeness = 1 / (1 + _squared_distances(y))
    np.fill_diagonal(closeness, 0.0)
    q = np.maximum(closeness / closeness.sum(), _TINY)
    pull = (p - q) * closeness
    return np.asarray(4 * (pull.sum(axis=1)[:, None] * y - pull @ y), dtype=np.float64)
