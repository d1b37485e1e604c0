"""Pages that a command writes are as the command would write them now."""

from __future__ import annotations

import json

from benchmarks import figures_page
from benchmarks.figures import RESULTS
from docs.site_build import commands_page


def test_the_page_of_commands_is_current() -> None:
    """Whoever changes a command or an option writes the page again."""
    current = commands_page.PAGE.read_text(encoding="utf-8") == commands_page.page()
    assert current, "run: python -m docs.site_build.commands_page"


def test_the_page_of_figures_is_current() -> None:
    """Whoever measures anew writes the page again."""
    current = figures_page.PAGE.read_text(encoding="utf-8") == figures_page.page()
    assert current, "run: python -m benchmarks.figures_page"


def test_the_page_of_figures_has_a_missed_goal_and_a_large_number() -> None:
    """A figure of the file of `round_transfer` above a thousand is shown with a comma and without decimals."""
    figures = json.loads((RESULTS / "round_transfer.json").read_text(encoding="utf-8"))["figures"]
    (blob,) = (figure for figure in figures if figure["name"] == "raw TCP, a 45 MB blob")
    thousands, rest = divmod(round(blob["median"]), 1000)
    assert thousands > 0
    page = figures_page.page()
    assert f"| raw TCP, a 45 MB blob | {thousands},{rest:03} |" in page
    missed = [line for line in page.splitlines() if "**missed**" in line]
    assert len(missed) == sum(
        figure["met"] is False
        for name in figures_page.measured()
        for figure in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["figures"]
    )
