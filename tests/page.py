"""An HTML page as a test reads it."""

from __future__ import annotations

import base64
import io
from html.parser import HTMLParser

from PIL import Image

_VOID = {"meta", "img"}


class Page(HTMLParser):
    """Tags with their attributes, and the text; every tag must be closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One more is open."""
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """It must be the innermost one."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """What is read."""
        self.text += data

    def images(self) -> dict[str, Image.Image]:
        """By what they are said to show."""
        found = [attrs for tag, attrs in self.tags if tag == "img"]
        prefix = "data:image/png;base64,"
        return {
            attrs["alt"] or "": Image.open(io.BytesIO(base64.b64decode((attrs["src"] or "").removeprefix(prefix))))
            for attrs in found
        }
