"""Linear CKA."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from coordinator.aggregation.similarity import centred_gram, cka_matrix, linear_cka


def _column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def test_columns_by_hand() -> None:
    """X = (1,2,3,4), centred (-1.5,-.5,.5,1.5): with 2X it is 1; with (1,-1,1,-1) (-2)^2 / (5 * 4) = .2."""
    x = _column(1, 2, 3, 4)
    assert linear_cka(x, 2 * x) == pytest.approx(1.0)
    assert linear_cka(x, _column(1, -1, 1, -1)) == pytest.approx(0.2)


@pytest.mark.parametrize(("rows", "p", "q"), [(40, 5, 7), (6, 30, 11)])
def test_it_is_hsic_over_gram_matrices(rows: int, p: int, q: int) -> None:
    """By the other definition: tr(KHLH) / sqrt(tr(KHKH) tr(LHLH)), H = I - 1/n; more rows than columns, and fewer."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(rows, p)), rng.normal(size=(rows, q))
    h = np.eye(rows) - 1 / rows
    k, t = h @ x @ x.T @ h, h @ y @ y.T @ h
    expected = np.trace(k @ t) / np.sqrt(np.trace(k @ k) * np.trace(t @ t))
    assert linear_cka(torch.tensor(x), torch.tensor(y)) == pytest.approx(expected, rel=1e-9)


def test_a_rotation_and_a_factor_change_nothing() -> None:
    """Orthogonal Q from a QR decomposition."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(20, 4, generator=rng, dtype=torch.float64)
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=rng, dtype=torch.float64))
    assert linear_cka(x, 3 * x @ rotation + 1) == pytest.approx(1.0)


def test_what_never_varies_is_like_nothing() -> None:
    """0/0."""
    assert math.isnan(linear_cka(_column(1, 2, 3), _column(5, 5, 5)))


def test_a_matrix_has_the_similarity_of_each_two() -> None:
    """X, 2X, Z of the worked values: 1, 1 and .2; a fourth that never varies has none, not even with itself."""
    x = _column(1, 2, 3, 4)
    found = cka_matrix([centred_gram(rows) for rows in (x, 2 * x, _column(1, -1, 1, -1), _column(5, 5, 5, 5))])
    for row, expected in zip(found, ([1, 1, 0.2], [1, 1, 0.2], [0.2, 0.2, 1]), strict=False):
        assert row[:3] == pytest.approx(expected)
    assert all(math.isnan(found[i][3]) and math.isnan(found[3][i]) for i in range(4))


def test_a_gram_matrix_says_all_that_is_asked() -> None:
    """Widths 5 and 30 over the same 12 rows: what `linear_cka` says of the rows themselves."""
    rng = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, width, generator=rng) for width in (5, 30))
    assert cka_matrix([centred_gram(x), centred_gram(y)])[0][1] == pytest.approx(linear_cka(x, y), rel=1e-9)


def test_rows_must_be_the_same_samples() -> None:
    """Four and three."""
    with pytest.raises(ValueError, match=r"expected \[n, p\] and \[n, q\], got \[4, 1\] and \[3, 1\]"):
        linear_cka(_column(1, 2, 3, 4), _column(1, 2, 3))
