"""`python -m docs.pictures`: the pictures of the live page in the documentation, from a staged fleet, in Chromium.

Needs Chromium and Playwright (`make browser`). The pictures have 200 colours, which halves them and is not seen.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from docs.site_build.staged_fleet import staged_page

__all__ = ["main"]

FOLDER = Path(__file__).parent / "pictures"
_VIEWS = (  # name, devices, view, theme, width
    ("overview-light", 50, "#/", "light", 1280),
    ("overview-dark", 50, "#/", "dark", 1280),
    ("overview-thousand-dark", 1000, "#/", "dark", 1920),
    ("devices-light", 50, "#/devices", "light", 1280),
    ("device-light", 50, "#/devices/pi-4-12", "light", 1280),
    ("overview-phone-light", 5, "#/", "light", 390),
)


def main() -> int:
    """Write all pictures; 1 if the page complains about anything."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        print("no Chromium: apt-get install -y --no-install-recommends chromium fonts-inter", file=sys.stderr)
        return 1
    problems: list[str] = []
    with sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        browser = started.chromium.launch(executable_path=program, args=options)
        for name, devices, view, theme, width in _VIEWS:
            path = FOLDER / f"{name}.png"
            with staged_page(devices) as (base, link):
                context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
                page = context.new_page()
                page.on("console", lambda message: problems.append(message.text))
                page.on("pageerror", lambda error: problems.append(str(error)))
                _show(page, base, link(), view)
                page.screenshot(path=path, full_page=view != "#/devices")
                context.close()
            with Image.open(path) as picture:
                picture.convert("RGB").quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)
            print(path)
        browser.close()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _show(page: Any, base: str, link: str, view: str) -> None:
    page.goto(link)
    page.get_by_text("Fleet now").wait_for()
    if view != "#/":
        page.goto(base + view)
    page.wait_for_timeout(1200)


if __name__ == "__main__":
    sys.exit(main())
