"""What a reader of plots stumbles over: rounds that are no whole numbers, names that cannot be told apart."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from coordinator.report import plots


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures behind the pictures."""
    figures: list[Figure] = []
    real = plots._png

    def png(figure: Figure) -> bytes:
        figures.append(figure)
        return real(figure)

    monkeypatch.setattr(plots, "_png", png)
    return figures


@pytest.mark.parametrize(
    ("last", "expected"),
    [(1, [1]), (2, [1, 2]), (5, [1, 2, 3, 4, 5]), (12, [2, 4, 6, 8, 10, 12]), (60, [0, 10, 20, 30, 40, 50, 60])],
)
def test_rounds_are_whole_numbers(drawn: list[Figure], last: int, expected: list[int]) -> None:
    """Also of one round only; of many rounds every second, fifth, tenth and so on."""
    curve = plots.Curve(name="accuracy", points=[(number, 0.5) for number in range(1, last + 1)])
    plots.lines([plots.Panel(curves=[curve])], x="round")
    (axes,) = drawn[0].axes
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == expected


def test_long_names_keep_their_begin_and_their_end(drawn: list[Figure]) -> None:
    """Of 22 letters 10, a mark and 11: devices of one building differ at the end."""
    names = [f"building-7-floor-3-line-a-{number:03}" for number in (1, 2)]
    plots.bars(plots.Bars(labels=names, parts={"up": [1.0, 2.0]}))
    (axes,) = drawn[0].axes
    told = [label.get_text() for label in axes.get_yticklabels()]
    assert told == ["building-7…-line-a-001", "building-7…-line-a-002"]


def test_what_others_are_compared_with_hides_none_of_them(drawn: list[Figure]) -> None:
    """FedAvg moves as much as the run: its line is dashed and thin, so that the other one is seen below it."""
    same = [(1.0, 5.0), (2.0, 5.0)]
    up = plots.Curve(name="up", points=same)
    reference = plots.Curve(name="FedAvg", points=same, is_reference=True)
    plots.lines([plots.bytes_panel([up, reference], "in the round")], x="round")
    below, above = drawn[0].axes[0].get_lines()
    assert (below.get_linestyle(), above.get_linestyle()) == ("-", "--")
    assert below.get_linewidth() > above.get_linewidth()
