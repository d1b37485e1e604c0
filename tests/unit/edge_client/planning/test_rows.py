"""Lines through measurements, the largest of several, and their file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from cost_rows import rows
from hypothesis import given
from hypothesis import strategies as st

from edge_client.planning.rows import Line, envelope, line_through, load_rows, minus, peak, plus, save_rows
from edge_client.records import to_map

# whole numbers, so that no test is about rounding
LINES = st.lists(st.tuples(st.integers(0, 50).map(float), st.integers(-500, 500).map(float)), max_size=8)


def test_a_line_goes_through_both_measurements() -> None:
    """8 samples took 100 and 16 took 180: 10 per sample and 20 without any."""
    assert line_through((8, 16), 100, 180) == (10, 20)


def test_a_line_never_falls() -> None:
    """16 samples took less than 8, by rounding: a constant that covers both."""
    assert line_through((8, 16), 180, 100) == (0, 180)


def test_lines_add_up() -> None:
    """Slopes and constants by themselves."""
    assert plus((1, 2), (3, 4)) == (4, 6)
    assert minus((4, 6), (3, 4)) == (1, 2)


def test_the_peak_is_the_largest_line() -> None:
    """10 n + 20 against 15 n: equal at 4 samples; nothing of no lines."""
    lines = ((10.0, 20.0), (15.0, 0.0))
    assert [peak(lines, n) for n in (1, 4, 8)] == [30, 60, 120]
    assert peak((), 8) == 0


@given(LINES)
def test_the_envelope_has_the_same_peak_everywhere(lines: list[Line]) -> None:
    """From one sample on; and it is made of the given lines alone."""
    kept = envelope(lines)
    assert set(kept) <= set(lines)
    for n in (1, 2, 3, 7, 50, 1000):
        assert peak(kept, n) == max((slope * n + constant for slope, constant in lines), default=0.0)


@given(LINES)
def test_the_envelope_has_no_line_too_many(lines: list[Line]) -> None:
    """Each is the largest for some number of samples, which need not be a whole one; slopes rise."""
    kept = envelope(lines)
    assert list(kept) == sorted(kept)
    assert len({slope for slope, _ in kept}) == len(kept)
    for one, two, three in zip(kept, kept[1:], kept[2:], strict=False):
        middle = (one[1] - three[1]) / (three[0] - one[0])  # where the outer two cross
        assert two[0] * middle + two[1] > one[0] * middle + one[1] - 1e-9


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    """Bit for bit; with another key they are not the ones that were asked for."""
    path = tmp_path / "folder" / "rows.json"
    save_rows(path, rows())
    assert load_rows(path, key="0" * 64) == rows()
    assert load_rows(path, key="1" * 64) is None
    assert load_rows(tmp_path / "nothing.json") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\xff",
        json.dumps({**to_map(rows()), "format": 1}),
        json.dumps({**to_map(rows()), "base_bytes": -1}),
        json.dumps({**to_map(rows()), "margin": float("nan")}),
        json.dumps({**to_map(rows()), "modes": {"plain": [{"name": "x"}]}}),
    ],
)
def test_a_file_that_makes_no_sense_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """They can be measured again."""
    path = tmp_path / "rows.json"
    path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert load_rows(path) is None
    assert "not usable as cost rows, ignored" in caplog.text
