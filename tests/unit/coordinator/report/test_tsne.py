"""t-SNE: its similarities and its gradient against their definitions, clusters that stay apart, equal bits."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.report.tsne import _gradient, _row, neighbours, tsne


def _points(per_cluster: int = 15) -> tuple[np.ndarray, np.ndarray]:
    """Three clusters in 20 dimensions, 10 apart, of width 1."""
    rng = np.random.Generator(np.random.PCG64(3))
    labels = np.repeat(np.arange(3), per_cluster)
    return rng.normal(0, 1, (len(labels), 20)) + 10 * np.eye(20)[labels], labels


def test_similarities_have_the_perplexity_that_was_asked_for() -> None:
    """P is symmetric, adds up to 1; of four points on a line the nearest has most. A row's entropy is as asked."""
    x = np.array([[0.0], [1.0], [3.0], [7.0]])
    p = neighbours(x, 2.0)
    assert p == pytest.approx(p.T)
    assert p.sum() == pytest.approx(1, abs=1e-9)
    assert np.diag(p) == pytest.approx(0)
    assert p[0, 1] > p[0, 2] > p[0, 3]
    row = _row(np.array([np.inf, 1.0, 4.0]), np.log(1.5))
    assert -(row[1:] * np.log(row[1:])).sum() == pytest.approx(np.log(1.5), abs=1e-5)


def test_the_gradient_is_that_of_the_divergence() -> None:
    """Against central differences of KL(P || Q)."""
    rng = np.random.Generator(np.random.PCG64(1))
    p, y = neighbours(rng.normal(size=(6, 3)), 2.0), rng.normal(size=(6, 2))

    def divergence(at: np.ndarray) -> float:
        close = 1 / (1 + ((at[:, None] - at[None]) ** 2).sum(-1))
        np.fill_diagonal(close, 0)
        q = close / close.sum()
        inside = ~np.eye(6, dtype=bool)
        return float((p[inside] * np.log(p[inside] / q[inside])).sum())

    found = _gradient(p, y)
    for index in np.ndindex(y.shape):
        step = np.zeros_like(y)
        step[index] = 1e-5
        assert found[index] == pytest.approx((divergence(y + step) - divergence(y - step)) / 2e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_clusters_stay_together_and_apart(seed: int) -> None:
    """Every point's five nearest in the plane are of its own cluster, wherever the points begin."""
    x, labels = _points()
    y = tsne(x, seed=seed, perplexity=5)
    distances = ((y[:, None] - y[None]) ** 2).sum(-1)
    np.fill_diagonal(distances, np.inf)
    nearest = np.argsort(distances, axis=1)[:, :5]
    assert (labels[nearest] == labels[:, None]).all()


def test_equal_seeds_give_equal_bits() -> None:
    """Another seed another picture."""
    x, _ = _points(5)
    assert np.array_equal(tsne(x, seed=1), tsne(x, seed=1))
    assert not np.array_equal(tsne(x, seed=1), tsne(x, seed=2))


def test_what_has_no_picture_is_refused() -> None:
    """Three points; a value that is not finite."""
    with pytest.raises(ValueError, match="four or more rows of finite numbers"):
        tsne(np.zeros((3, 2)), seed=1)
    with pytest.raises(ValueError, match="four or more rows"):
        tsne(np.full((5, 2), np.nan), seed=1)


def test_equal_points_are_no_problem() -> None:
    """All distances are zero: a finite picture."""
    assert np.isfinite(tsne(np.zeros((6, 3)), seed=1)).all()
