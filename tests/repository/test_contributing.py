"""The map in CONTRIBUTING.md, and every other page that names files, leads to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PLACE = re.compile(r"`((?:edge_client|coordinator|tests|deploy|profiles|benchmarks)/[\w./-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """Paths in backticks; capitals such as NAME stand for something that the reader chooses."""
    places = [place for place in _PLACE.findall(page.read_text(encoding="utf-8")) if not re.search(r"[A-Z]{3}", place)]
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_the_glossary_is_short() -> None:
    """At most 40 lines: people read it to the end."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Glossary\n")[2].partition("\n## ")[0]
    assert 10 < len(section.strip().splitlines()) <= 40
