"""The shape of a sample as text: one parser for all commands."""

from __future__ import annotations

import pytest

from edge_client.config.shape_text import parse_shape, typed_shape
from edge_client.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3x96x96", (3, 96, 96)),
        ("1X8X8", (1, 8, 8)),
        ("64", (64,)),
        ("99999", (99_999,)),
        ("1x2x3x4x5x6", (1, 2, 3, 4, 5, 6)),
    ],
)
def test_sizes_are_numbers_with_an_x_between(text: str, expected: tuple[int, ...]) -> None:
    """A large X, too."""
    assert parse_shape(text) == typed_shape(text) == expected


@pytest.mark.parametrize(
    "text", ["", "3y4", "3by4", "x8", "8x", "1xx8", "0x8", "-1x8", "100000", "1.5x8", "8 x 8", "²x8"]
)
def test_anything_else_is_one_clear_error(text: str) -> None:
    """It names the option, an example and what was typed."""
    with pytest.raises(InputError, match=r"^--input: expected a shape such as 3x96x96, .* got ") as caught:
        parse_shape(text)
    assert str(caught.value).endswith(repr(text))


def test_nobody_typed_a_shape() -> None:
    """It is the model's or the data's."""
    assert typed_shape(None) is None
