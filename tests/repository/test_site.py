"""The site of `make docs` loads nothing from other servers: what its hook finds in a page, and what it leaves alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[2] / "docs/site_build/offline.py"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.html", '<script src="https://cdn.example/a.js"></script>', ["https://cdn.example/a.js"]),
        ("a.html", '<link rel="preconnect" href="//fonts.example">', ["//fonts.example"]),
        ("a.html", '<img src="../pictures/a.png"><script src="assets/a.js"></script>', []),
        ("a.html", '<a href="https://arxiv.org/abs/1">a paper</a><link rel="canonical" href="https://a.example/">', []),
        ("a.css", "@import '//a.example/b.css'; p { background: url(https://a.example/c.png) }", None),
        ("a.css", "p { background: url(c.png) }", []),
        ("a.html", '<pre class="mermaid">graph</pre>', ["the renderer of mermaid diagrams"]),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(
    tmp_path: Path, name: str, text: str, found: list[str] | None
) -> None:
    """A link that a reader follows is no load."""
    spec = importlib.util.spec_from_file_location("offline", HOOK)
    assert spec is not None
    assert spec.loader is not None
    offline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(offline)
    (tmp_path / name).write_text(text, encoding="utf-8")
    expected = ["//a.example/b.css", "https://a.example/c.png"] if found is None else found
    assert list(offline.loaded_by(tmp_path / name)) == expected
