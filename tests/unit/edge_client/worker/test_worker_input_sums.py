"""The sums of a device's inputs: by hand, and only where the owner lets them leave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge_client.config.device_file import ShareSection
from edge_client.worker.input_sums import add_up, why_withheld


class _Samples:
    """Samples in memory."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.labels = torch.zeros(len(x), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The samples at `indices`."""
        return self.x[indices], self.labels[indices]


def test_sums_and_squares_of_each_channel() -> None:
    """Two samples of 2 x 1 x 2: channel 0 has 1, 2, 5, 6, channel 1 has 3, 4, 7, 8."""
    sums = add_up(_Samples(torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]], [[[5.0, 6.0]], [[7.0, 8.0]]]])))
    assert sums is not None
    assert sums.count == 4
    assert sums.sums == (14.0, 22.0)
    assert sums.squares == (1 + 4 + 25 + 36, 9 + 16 + 49 + 64)


def test_sums_over_several_batches_are_those_of_float64() -> None:
    """1,000 samples of 0.1 (float32): float32 sums would be wrong in the sixth digit."""
    x = torch.full((1000, 3), 0.1)
    sums = add_up(_Samples(x))
    assert sums is not None
    assert sums.sums == pytest.approx([1000 * x[0, 0].item()] * 3, rel=1e-12)


def test_inputs_that_are_not_finite_have_no_sums() -> None:
    """Training reports them; a sum that is no number would be refused as a whole."""
    assert add_up(_Samples(torch.tensor([[1.0], [float("inf")]]))) is None


@pytest.mark.parametrize(
    ("share", "num_samples", "why"),
    [
        ({}, 32, ""),
        ({}, 31, "31 samples"),
        ({"min_count": 10}, 10, ""),
        ({"min_count": 10}, 9, "9 samples"),
        ({"input_statistics": False}, 1000, "input-statistics"),
        ({"noise": 1.0, "clip": 1.0}, 1000, "share.noise"),
    ],
)
def test_the_owner_decides_whether_sums_leave(share: dict[str, object], num_samples: int, why: str) -> None:
    """Never of fewer samples than share.min-count, and never where the owner asks for noise."""
    withheld = why_withheld(ShareSection(**share), num_samples)  # type: ignore[arg-type]
    assert (why in withheld) if why else withheld == ""
