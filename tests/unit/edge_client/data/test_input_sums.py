"""Mean and scale from the sums of several devices, by hand; sums that no samples have are refused."""

from __future__ import annotations

import math

import pytest

from edge_client.data.input_sums import check_sums, normalisation_of
from edge_client.errors import PayloadError
from edge_client.records import InputSums


def _sums(count: int, sums: list[float], squares: list[float]) -> InputSums:
    return InputSums(count=count, sums=tuple(sums), squares=tuple(squares))


def test_mean_and_scale_are_those_of_all_values_in_one_place() -> None:
    """1, 3 and 5, 7, 9: the mean is 5, the variance (16 + 4 + 0 + 4 + 16) / 5 = 8; 4 everywhere has none."""
    first = _sums(2, [1 + 3, 8], [1 + 9, 32])
    second = _sums(3, [5 + 7 + 9, 12], [25 + 49 + 81, 48])
    numbers = normalisation_of([first, second], [1.0, 1.0])
    assert numbers.mean == (5.0, 4.0)
    assert numbers.scale == (pytest.approx(1 / math.sqrt(8), rel=1e-15), 1.0)
    assert numbers.constant == (1,)


def test_a_device_with_half_a_weight_counts_half() -> None:
    """Values 0, 0 and 6, 6 with weights 1 and 1/2: mean 6 / 3 = 2, mean of squares 36 / 3 = 12, variance 8."""
    numbers = normalisation_of([_sums(2, [0], [0]), _sums(2, [12], [72])], [1.0, 0.5])
    assert numbers.mean == (2.0,)
    assert numbers.scale == (pytest.approx(1 / math.sqrt(8), rel=1e-15),)


def test_rounding_of_large_values_is_no_variance() -> None:
    """10 values of 1e9 + 0.1 in float64: what is left of the difference of squares is rounding."""
    value = 1e9 + 0.1
    numbers = normalisation_of([_sums(10, [10 * value], [10 * value * value])], [1.0])
    assert numbers.constant == (0,)
    assert numbers.scale == (1.0,)


@pytest.mark.parametrize(
    ("sums", "num_samples", "code", "detail"),
    [
        (_sums(40, [1.0], [1.0]), 20, "shape", "expected sums of 2 channels, got 1"),
        (_sums(40, [1.0, 1.0], [1.0]), 20, "shape", "expected sums of squares of 2 channels, got 1"),
        (_sums(41, [1.0, 1.0], [1.0, 1.0]), 20, "sample_count", "41 values of 20 samples"),
        (_sums(9, [1.0, 1.0], [1.0, 1.0]), 9, "sample_count", "10 samples or more"),
        (_sums(40, [1.0, 1.0], [1.0, -1.0]), 20, "range", "channel 1, got -1"),
        (_sums(40, [1.0, 1.0], [1.0, 1e300]), 20, "range", "channel 1, got 1e+300"),
        # a mean of 1 has a mean of squares of 1 or more: 40 values need 40
        (_sums(40, [40.0, 40.0], [40.0, 39.0]), 20, "range", "no values have the sum 40"),
    ],
)
def test_sums_that_no_samples_have_are_refused(sums: InputSums, num_samples: int, code: str, detail: str) -> None:
    """Each says who sent what, and what was expected."""
    with pytest.raises(PayloadError) as caught:
        check_sums(sums, num_channels=2, num_samples=num_samples, source="update from 'a'")
    assert caught.value.code == code
    assert detail in caught.value.detail
    assert "update from 'a'" in caught.value.detail


def test_sums_of_real_values_are_accepted() -> None:
    """Equal values are the limit of the check: the square of their mean is the mean of their squares."""
    check_sums(_sums(30, [3.0, 0.0], [30 * 0.1 * 0.1, 0.0]), num_channels=2, num_samples=10, source="a")
