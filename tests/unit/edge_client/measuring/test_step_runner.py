"""With which batches a model is measured."""

from __future__ import annotations

import pytest

from edge_client.measuring.step_runner import activation_bytes, batches_for
from edge_client.models import registry


@pytest.mark.parametrize(("size", "expected"), [(8, (8, 16)), (1200, (4, 8)), (1700, (2, 4))])
def test_large_samples_are_measured_in_small_batches(size: int, expected: tuple[int, int]) -> None:
    """The activations of the larger batch stay below 268 MB.

    An mlp has those of its flattened input, and 4 + 4 + 2 more; counted three times: 12 (n^2 + 10) bytes for n x n.
    16 samples of 1200 x 1200 would take 276 MB, and 8 samples of 1700 x 1700 277 MB.
    """
    model = registry.build("mlp", input_shape=(1, size, size), num_classes=2, options={"hidden": [4]})
    assert activation_bytes(model) == 12 * (size * size + 10)
    assert batches_for(model) == expected
