"""The similarity of two representations: linear CKA (Kornblith et al., "Similarity of Neural Network Representations
Revisited", ICML 2019).

    CKA(X, Y) = ||Y'X||^2 / (||X'X|| ||Y'Y||)    Frobenius norms of the centred X [n, p] and Y [n, q]

1 for representations that differ by a rotation and a factor, 0 for two that have nothing in common. Rows are the same
n samples (or n equally long pieces of a gradient) in both; X and Y may be of different width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

__all__ = ["centred_gram", "cka_matrix", "linear_cka"]


def linear_cka(x: Tensor, y: Tensor) -> float:
    """The similarity of [n, p] and [n, q], computed in float64; NaN if one of them is the same in all rows."""
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise ValueError(f"expected [n, p] and [n, q], got {list(x.shape)} and {list(y.shape)}")
    x, y = (rows.double() - rows.double().mean(dim=0) for rows in (x, y))
    if x.shape[1] + y.shape[1] > len(x):  # then [n, n] is the smaller way round: ||Y'X||^2 = <XX', YY'>
        grams = x @ x.T, y @ y.T
        shared = float((grams[0] * grams[1]).sum())
    else:
        grams = x.T @ x, y.T @ y
        shared = float((y.T @ x).square().sum())
    size = float(grams[0].square().sum().sqrt() * grams[1].square().sum().sqrt())
    return shared / size if size > 0 else math.nan


def centred_gram(x: Tensor) -> Tensor:
    """XX' of the centred X [n, p], in float64: all that linear CKA needs of it, and of one size for any width."""
    if x.ndim != 2:
        raise ValueError(f"expected [n, p], got {list(x.shape)}")
    centred = x.double() - x.double().mean(dim=0)
    return centred @ centred.T


def cka_matrix(grams: Sequence[Tensor]) -> list[list[float]]:
    """The similarity of every two centred Gram matrices: <K, L> / (||K|| ||L||)."""
    sizes = [float(gram.square().sum().sqrt()) for gram in grams]
    matrix = [[math.nan] * len(grams) for _ in grams]
    for i, first in enumerate(grams):
        for j, second in enumerate(grams[: i + 1]):
            if sizes[i] > 0 and sizes[j] > 0:
                matrix[i][j] = matrix[j][i] = float((first * second).sum()) / (sizes[i] * sizes[j])
    return matrix
