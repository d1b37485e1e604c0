"""A hook of MkDocs: the site that was built loads nothing from other servers, so that it can be read without a network.

Covers what a page loads by itself: scripts, styles, pictures, frames, fonts. Links that a reader follows are no part of
that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
_ONLY_NAMES = {"canonical", "prev", "next", "alternate"}  # relations of a link that load nothing
_ELSEWHERE = re.compile(r"(?:https?:)?//")
_IN_STYLES = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


def on_post_build(config: Any, **_: Any) -> None:
    """End the build with every address that a page would load from elsewhere."""
    site = Path(config["site_dir"])
    found = [
        f"{path.relative_to(site)} loads {address}" for path in sorted(site.rglob("*")) for address in loaded_by(path)
    ]
    if found:
        raise SystemExit("\n".join(found))


def loaded_by(path: Path) -> Iterator[str]:
    """The addresses on other servers that a file of the site loads."""
    if path.suffix == ".html":
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        yield from page.found
    elif path.suffix == ".css":
        yield from _IN_STYLES.findall(path.read_text(encoding="utf-8"))


class _Page(HTMLParser):
    """Collects the addresses on other servers that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(_LOADS.get(tag, "")) or ""
        if _ELSEWHERE.match(address) and given.get("rel") not in _ONLY_NAMES:
            self.found.append(address)
        if given.get("class") == "mermaid":  # the theme would fetch its renderer
            self.found.append("the renderer of mermaid diagrams")
