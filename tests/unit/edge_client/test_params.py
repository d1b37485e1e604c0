"""The coverage mean on the worked examples, its invariants, buffers and sums of squares."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from edge_client import params
from edge_client.params import IndexMap, coverage_mean

FULL = None


def _index(*axes: list[int]) -> IndexMap:
    return tuple(torch.tensor(axis, dtype=torch.int64) for axis in axes)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("weights", "expected"), [((10.0, 30.0, 60.0), (4.0, 7.6667, 7.0)), ((1.0, 1.0, 1.0), (3.0, 7.0, 7.0))]
)
def test_depth_example(weights: tuple[float, ...], expected: tuple[float, ...]) -> None:
    """b0: (10*1 + 30*3 + 60*5) / 100 = 4; b1: (30*5 + 60*9) / 90 = 7.6667; b2: 7. Uniform: 9/3, 14/2, 7."""
    uploads = [{"b0": 1.0}, {"b0": 3.0, "b1": 5.0}, {"b0": 5.0, "b1": 9.0, "b2": 7.0}]
    for name, value in zip(("b0", "b1", "b2"), expected, strict=True):
        parts = [(torch.tensor(u[name]), FULL, w) for u, w in zip(uploads, weights, strict=True) if name in u]
        assert float(coverage_mean(torch.tensor(0.0), parts)) == pytest.approx(value, abs=1e-4)


def test_width_example() -> None:
    """Server of nines, full client [[1,2],[3,4]], half-width client [[5]]: the corner is (1 + 5) / 2 = 3."""
    full = (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), FULL, 1.0)
    half = (torch.tensor([[5.0]]), _index([0], [0]), 1.0)
    nines = torch.full((2, 2), 9.0)
    assert coverage_mean(nines, [full, half]).tolist() == [[3.0, 2.0], [3.0, 4.0]]
    assert coverage_mean(nines, [half, full]).tolist() == [[3.0, 2.0], [3.0, 4.0]]


def test_what_nobody_covers_keeps_the_old_value() -> None:
    """The half-width client alone: [[5, 9], [9, 9]]."""
    half = (torch.tensor([[5.0]]), _index([0], [0]), 1.0)
    assert coverage_mean(torch.full((2, 2), 9.0), [half]).tolist() == [[5.0, 9.0], [9.0, 9.0]]


def test_without_parts_the_old_tensor_stays() -> None:
    """As a copy: the result is the caller's to change."""
    old = torch.tensor([1.0, 2.0])
    new = coverage_mean(old, [])
    assert torch.equal(new, old)
    assert new.data_ptr() != old.data_ptr()


def test_index_vectors_need_not_be_in_order() -> None:
    """A rolled window of rows (2, 0) and columns (1, 2): x[0, 0] = 1 goes to row 2, column 1."""
    part = (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), _index([2, 0], [1, 2]), 4.0)
    assert coverage_mean(torch.zeros(3, 3), [part]).tolist() == [[0, 3, 4], [0, 0, 0], [0, 1, 2]]


def test_mixed_cover_is_numpys_weighted_mean() -> None:
    """Independent: loops over elements in numpy float64; 5 parts, 3 of them slices; seed 4."""
    rng = np.random.default_rng(4)
    old = _random(6, 5, seed=4)
    total, weight = np.zeros((6, 5)), np.zeros((6, 5))
    parts: list[params.Part] = []
    for k in range(5):
        rows = list(range(6)) if k < 2 else sorted(rng.choice(6, 3, replace=False).tolist())
        columns = list(range(5)) if k < 2 else sorted(rng.choice(5, 2, replace=False).tolist())
        x = _random(len(rows), len(columns), seed=10 + k)
        w = float(rng.integers(1, 100))
        parts.append((x, FULL if k < 2 else _index(rows, columns), w))
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                total[row, column] += w * float(x[i, j])
                weight[row, column] += w
    np.testing.assert_array_equal(coverage_mean(old, parts).numpy(), (total / weight).astype(np.float32))


def test_identical_uploads_come_back_bit_for_bit() -> None:
    """The float64 sum is off by less than half a float32 step, so that the one cast restores x; also for subnormals."""
    x = torch.cat([_random(100_000, seed=5), torch.tensor([1e-45, 3.4e38, -0.1, 0.0])])
    parts = [(x, FULL, w) for w in (1.0, 3.0, 7.0, 1797.0, 60_000.0)]
    assert torch.equal(coverage_mean(torch.zeros_like(x), parts), x)


def test_large_tensors_are_summed_like_small_ones() -> None:
    """Pieces of 65,536 elements change nothing: numpy's float64 mean of 150,001 elements, cast once; seed 6."""
    xs = [_random(150_001, seed=6 + k) for k in range(3)]
    weights = [3.0, 5.0, 11.0]
    expected = sum(x.numpy().astype(np.float64) * w for x, w in zip(xs, weights, strict=True)) / 19.0
    got = coverage_mean(xs[0], [(x, FULL, w) for x, w in zip(xs, weights, strict=True)])
    np.testing.assert_array_equal(got.numpy(), np.asarray(expected).astype(np.float32))


def test_sums_do_not_lose_small_values_beside_large_ones() -> None:
    """1e8 + 1 - 1e8 over 3 is 1/3 in float64; in float32 the 1 would be lost."""
    parts = [(torch.tensor([v]), FULL, 1.0) for v in (1e8, 1.0, -1e8)]
    assert float(coverage_mean(torch.zeros(1), parts)) == pytest.approx(1 / 3, rel=1e-6)


def test_the_parts_are_left_as_they_were() -> None:
    """Callers may use them again."""
    x = _random(10, seed=7)
    before = x.clone()
    coverage_mean(torch.zeros(10), [(x, FULL, 2.0), (x[:3], _index([0, 1, 2]), 2.0)])
    assert torch.equal(x, before)


def test_parts_are_taken_one_at_a_time() -> None:
    """A generator of a cohort's tensors is never gathered: at most one is alive beside the one being made."""
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def stream() -> Iterator[params.Part]:
        nonlocal most
        for k in range(5):
            x = torch.full((3,), float(k))
            made.append(weakref.ref(x))
            most = max(most, sum(ref() is not None for ref in made))
            yield x, FULL, 1.0

    assert coverage_mean(torch.zeros(3), stream()).tolist() == [2.0, 2.0, 2.0]
    assert most <= 2


def test_counters_take_the_largest_value() -> None:
    """num_batches_tracked of 7 and 12, whatever the weights and the old value of 40; nobody: 40."""
    parts = [(torch.tensor(7), FULL, 100.0), (torch.tensor(12), FULL, 1.0)]
    new = coverage_mean(torch.tensor(40), parts)
    assert int(new) == 12
    assert new.dtype == torch.int64
    assert int(coverage_mean(torch.tensor(40), [])) == 40


def test_counters_in_a_slice_leave_the_rest() -> None:
    """Index 1 is covered, index 0 is not."""
    assert coverage_mean(torch.tensor([5, 5]), [(torch.tensor([3]), _index([1]), 1.0)]).tolist() == [5, 3]


def test_a_part_of_weight_zero_counts_for_nothing() -> None:
    """A device that trained on nothing; if it is the only one, the old value stays."""
    nothing = (torch.tensor([100.0]), FULL, 0.0)
    assert coverage_mean(torch.tensor([1.0]), [nothing]).tolist() == [1.0]
    assert coverage_mean(torch.tensor([1.0]), [nothing, (torch.tensor([3.0]), FULL, 2.0)]).tolist() == [3.0]


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_an_impossible_weight_is_misuse(weight: float) -> None:
    """It would spoil the mean without a trace."""
    with pytest.raises(ValueError, match="weight"):
        coverage_mean(torch.zeros(1), [(torch.zeros(1), FULL, weight)])


def test_a_part_that_does_not_fit_its_place_is_misuse() -> None:
    """Broadcasting a [1] over a [3] would be silent nonsense."""
    with pytest.raises(ValueError, match="does not fit"):
        coverage_mean(torch.zeros(3), [(torch.zeros(1), FULL, 1.0)])
    with pytest.raises(ValueError, match="does not fit"):
        coverage_mean(torch.zeros(3, 3), [(torch.zeros(2), _index([0, 1]), 1.0)])


def test_a_variance_never_falls_below_zero() -> None:
    """0.1 - 0.3 becomes 0 after a delta; a mean may be negative."""
    assert params.settle_buffer("bn.running_var", torch.tensor([-0.2, 1.5])).tolist() == [0.0, 1.5]
    assert params.settle_buffer("bn.running_mean", torch.tensor([-0.5, 1.5])).tolist() == [-0.5, 1.5]


def test_inner_product_agrees_with_numpy_over_many_pieces() -> None:
    """Three pieces of 65,536, the last one short; in float64, of products that add up to 100,000 without signs."""
    rng = torch.Generator().manual_seed(4)
    x, y = torch.randn(150_000, generator=rng), torch.randn(300, 500, generator=rng)
    expected = float(x.double().numpy() @ y.flatten().double().numpy())
    assert params.inner_product(x, y) == pytest.approx(expected, abs=1e-8)


def test_square_sum_agrees_with_numpy_over_many_pieces() -> None:
    """200,000 elements are four pieces; numpy in float64; seed 8."""
    x, y = _random(200_000, seed=8), _random(200_000, seed=9)
    difference = x.numpy().astype(np.float64) - y.numpy().astype(np.float64)
    assert params.square_sum(x, y) == pytest.approx(float(difference @ difference), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 65_536, 99_999])
def test_square_sum_shows_a_single_bad_value(bad: float, where: int) -> None:
    """Wherever it hides; with and without a base."""
    x = torch.zeros(100_000)
    x[where] = bad
    assert not math.isfinite(params.square_sum(x))
    assert not math.isfinite(params.square_sum(x, torch.ones(100_000)))


def test_square_sum_of_large_finite_values_is_finite() -> None:
    """3e38 squared is 9e76: no float32, but a float64."""
    assert params.square_sum(torch.tensor([3e38, -3e38])) == pytest.approx(1.8e77, rel=1e-6)
