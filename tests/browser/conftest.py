"""A real browser: Debian's Chromium, driven by Playwright. Without one, the tests are skipped with the line that helps.

What goes wrong in a page is collected: messages on its console, errors, dialogs that nobody may open.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

INSTALL = "apt-get install -y --no-install-recommends chromium; .venv/bin/python -m pip install -e '.[browser]'"


@dataclass
class Problems:
    """What a page complained about."""

    lines: list[str] = field(default_factory=list)

    def watch(self, page: Any) -> None:
        """Collect what goes wrong in this page."""
        page.on("console", lambda message: self._console(message))
        page.on("pageerror", lambda error: self.lines.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.lines.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def _console(self, message: Any) -> None:
        # a request that is refused is logged by the browser; the tests that provoke one look at the answer
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.lines.append(f"{message.type}: {message.text}")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser, one for each file of tests."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    lacking = "Chromium" if program is None else "Playwright" if importlib.util.find_spec("playwright") is None else ""
    if lacking and "FEDFIT_NEEDS_BROWSER" in os.environ:
        pytest.fail(f"no {lacking}: {INSTALL}")
    if lacking:
        pytest.skip(f"no {lacking}: {INSTALL}")
    playwright = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = started.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


@pytest.fixture
def problems() -> Iterator[Problems]:
    """Nothing may go wrong in any page that it watches."""
    collected = Problems()
    yield collected
    assert collected.lines == []


@pytest.fixture
def page(chromium: Any, problems: Problems) -> Iterator[Any]:
    """A fresh browser window that is signed out."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(240_000)
    opened = context.new_page()
    problems.watch(opened)
    yield opened
    context.close()
