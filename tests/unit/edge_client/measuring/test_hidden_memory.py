"""Arithmetic on what a process has grown by."""

from __future__ import annotations

from edge_client.measuring.hidden_memory import Growth


def test_growths_combine_number_by_number() -> None:
    """Until each of two blocks, and in all."""
    one, other = Growth((1, 5), 9), Growth((4, 2), 7)
    assert one + other == Growth((5, 7), 16)
    assert one.larger(other) == Growth((4, 5), 9)
