"""The page docs/reference/benchmarks.md: every figure of `benchmarks/results`, with its goal and spread.

`python -m benchmarks.figures_page` writes it. Covers what `python -m benchmarks` measures; the comparisons with papers
have a page of their own (`science_table`).
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import KNOWN
from benchmarks.figures import RESULTS

__all__ = ["PAGE", "main", "measured", "page"]

Json = dict[str, Any]

PAGE = Path(__file__).parents[1] / "docs/reference/benchmarks.md"
_FOLDED = 10  # a longer table is folded up
_HEAD = """# Measured figures

Each figure comes from one command, which prints a table and writes `benchmarks/results/NAME.json` with every single
value. This page is generated from those files. `make bench` runs all; `.venv/bin/python -m benchmarks NAME` runs one.
How they measure is described in `benchmarks/README.md`.

MB are 10^6 bytes. The machines were shared and had no accelerator, so that seconds depend on what else they did; ratios
were measured within one run.
"""


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """The page as the results are now."""
    found = measured()
    return "\n".join([_HEAD, _summary(found), *(_section(name, result) for name, result in found.items())])


def measured() -> dict[str, Json]:
    """The results of all benchmarks that have been run, by name."""
    paths = {name: RESULTS / f"{name}.json" for name in KNOWN}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def _summary(results: dict[str, Json]) -> str:
    rows = ["## Goals", "", "| benchmark | goals | met | missed |", "|---|---|---|---|"]
    for name, found in results.items():
        judged = [figure for figure in found["figures"] if figure["met"] is not None]
        missed = [figure["name"] for figure in judged if not figure["met"]]
        if judged:
            met = len(judged) - len(missed)
            rows.append(f"| [`{name}`](#{name}) | {len(judged)} | {met} | {', '.join(missed)} |")
    return "\n".join([*rows, ""])


def _section(name: str, found: Json) -> str:
    machine, figures = found["machine"], found["figures"]
    about = f"Measured on {machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}."
    rows = "\n".join(_rows(figures))
    if len(figures) > _FOLDED:
        summary = f"<summary>{len(figures)} figures</summary>"
        rows = f'<details markdown="1">\n{summary}\n\n{rows}\n\n</details>'
    return f"## {name}\n\n{_about(name)}\n{about}\n\n{rows}\n"


def _rows(figures: Sequence[Json]) -> Iterator[str]:
    yield "| figure | median | smallest | largest | unit | goal | |"
    yield "|---|---|---|---|---|---|---|"
    for figure in figures:
        verdict = {True: "met", False: "**missed**", None: ""}[figure["met"]]
        values = " | ".join(_short(figure[key]) for key in ("median", "min", "max"))
        name = figure["name"].replace("|", "\\|")
        yield f"| {name} | {values} | {figure['unit']} | {figure['goal']} | {verdict} |"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _about(name: str) -> str:
    """The first paragraph of the benchmark's docstring; the benchmark itself is not imported."""
    source = (Path(__file__).parent / f"{KNOWN[name][0]}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]


if __name__ == "__main__":
    sys.exit(main())
