"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest

from edge_client.config.quantities import format_bytes, parse_bytes, parse_duration
from edge_client.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MB", 512_000_000),
        ("1.5GiB", 1_610_612_736),
        (" 2 kb ", 2000),
        ("0.3GB", 300_000_000),
        ("1.1GB", 1_100_000_000),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1: no float holds it
        ("0.0000000001B", 0),
    ],
)
def test_sizes_are_exact(text: str, expected: int) -> None:
    """Decimal and binary units, whole bytes."""
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MB", "-1", "1.5.5GB", "1 TB", "1e9", "9" * 400, "nan", ".5GB"])
def test_what_is_no_size(text: str) -> None:
    """Also numbers that are longer than any disk."""
    with pytest.raises(InputError, match="expected a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("30min", 1800), ("1.5h", 5400), ("250ms", 0.25), ("2d", 172800)]
)
def test_durations(text: str, expected: float) -> None:
    """In seconds."""
    assert parse_duration(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "90", "s", "-1s", "1 week", "1H"])
def test_what_is_no_duration(text: str) -> None:
    """A unit is needed."""
    with pytest.raises(InputError, match="expected a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (1_500_000_000, "1.5 GB"),
        (5 * 10**12, "5000 GB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    """Three digits, the next unit when they would not do."""
    assert format_bytes(count) == text
