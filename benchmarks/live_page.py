"""The live page: what it costs a coordinator that nobody watches, its first view, how soon news are seen, ten viewers.

Real coordinators; a thousand devices of a filled store for the view, two hundred for the news, and a thousand
connected ones (`light_devices`) for a round with ten viewers and without, in turn. Needs Chromium (`make browser`).
"""

from __future__ import annotations

import contextlib
import http.client
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.federation import SMALL, Federation, cpu_s, rss_mb, run_file, scratch
from benchmarks.figures import Figure
from benchmarks.light_devices import LightFleet
from coordinator.control_messages import LabelDevice
from coordinator.dashboard import messages
from coordinator.dashboard.messages import AddToken, MakeLink

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import filled_store  # the tests' helper: fills a store without devices

__all__ = ["measure", "view", "viewers"]

_PAGE = ("--page", "127.0.0.1:0")
_VIEWERS = 10


def measure(*, quick: bool) -> list[Figure]:
    """All of it."""
    return [*_unwatched(3 if quick else 5), *view(quick=quick), *viewers(quick=quick)]


def _unwatched(pairs: int) -> list[Figure]:
    """RSS of a coordinator with a page that nobody opens, less that of one without, started in turn."""
    values = []
    for _ in range(pairs):
        sizes = []
        for options in (("--no-page",), _PAGE):
            with (
                tempfile.TemporaryDirectory(dir=scratch()) as folder,
                Federation(Path(folder), options=options) as federation,
            ):
                federation.start()
                time.sleep(2)
                sizes.append(rss_mb(federation.pid("coordinator")))
        values.append(sizes[1] - sizes[0])
    return [Figure(name="RSS for a page that nobody opens", unit="MB", values=tuple(values), at_most=1.0)]


def view(*, quick: bool) -> list[Figure]:
    """The first view of a thousand devices, and news on the screen."""
    with _browser() as browser:
        return [*_first_view(browser, 3 if quick else 7), *_news(browser, 200, quick), *_news(browser, 1000, quick)]


@contextlib.contextmanager
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    with sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = started.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


@contextlib.contextmanager
def _filled(devices: int) -> Iterator[Federation]:
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        filled_store.fill(Path(folder) / "coordinator", devices=devices)
        with Federation(Path(folder), options=_PAGE) as federation:
            federation.start()
            yield federation


_SHOWN = """
new MutationObserver((_, observer) => {
  if (document.querySelector("table.devices tbody tr")) { window.shownAt = performance.now(); observer.disconnect(); }
}).observe(document, { childList: true, subtree: true });
"""


def _first_view(browser: Any, repeats: int) -> list[Figure]:
    """From the request for the page to a table with rows; a browser that has signed in, with an empty cache."""
    seconds, sizes = [], []
    with _filled(1000) as federation:
        for _ in range(repeats + 1):
            context = browser.new_context()
            page = context.new_page()
            page.goto(messages.ask(federation.state_dir, MakeLink()).url)
            page.get_by_text("Fleet now").wait_for()
            page.add_init_script(_SHOWN)
            received: list[Any] = []
            page.on("requestfinished", lambda request, received=received: received.append(request))
            page.goto("about:blank")
            page.goto(messages.ask(federation.state_dir, MakeLink()).url.partition("#")[0] + "#/devices")
            page.locator("table.devices tbody tr").first.wait_for()
            seconds.append(page.evaluate("window.shownAt") / 1000)
            page.wait_for_timeout(300)
            measured = [request.sizes() for request in received]
            sizes.append(sum(one["responseBodySize"] + one["responseHeadersSize"] for one in measured) / 1000)
            context.close()
    return [
        Figure(name="first view of 1,000 devices: bytes", unit="kB", values=tuple(sizes[1:]), at_most=150),
        Figure(name="first view of 1,000 devices: table", unit="s", values=tuple(seconds[1:]), at_most=0.5),
    ]


def _news(browser: Any, devices: int, quick: bool) -> list[Figure]:
    """From the answer to a request that changes a device until the change is in the page."""
    seconds = []
    with _filled(devices) as federation:
        context = browser.new_context()
        page = context.new_page()
        page.goto(messages.ask(federation.state_dir, MakeLink()).url)
        page.goto(page.url.partition("#")[0] + "#/devices/device-00003")
        page.get_by_text("line=a").wait_for()
        page.evaluate(
            """() => { window.seen = {}; new MutationObserver(() => {
              for (const at of document.body.innerText.matchAll(/news=(\\d+)/g)) window.seen[at[1]] ??= Date.now();
            }).observe(document.body, { childList: true, subtree: true, characterData: true }); }"""
        )
        for number in range(8 if quick else 25):
            time.sleep(1.1 + 0.037 * number)  # at every place of the second
            federation.ask(LabelDevice(name="device-00003", put={"news": str(number)}))
            began = time.time()
            while not (seen := page.evaluate(f"window.seen[{number}] || 0")):
                time.sleep(0.02)
            seconds.append(seen / 1000 - began)
        context.close()
    name = f"from a change to the screen, {devices:,} devices"
    return [Figure(name=name, unit="s", values=tuple(seconds), at_most=0.3 if devices <= 200 else 1.0)]


class _Viewers:
    """Ten streams of events that are read, as ten browsers would."""

    def __init__(self, port: int, token: str) -> None:
        self._stop = threading.Event()
        self._responses = []
        for _ in range(_VIEWERS):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/api/v1/events", headers={"Authorization": f"Bearer {token}"})
            self._responses.append((connection, connection.getresponse()))
        self._threads = [threading.Thread(target=self._read, args=(one,), daemon=True) for _, one in self._responses]
        for thread in self._threads:
            thread.start()

    def _read(self, response: http.client.HTTPResponse) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            while not self._stop.is_set() and response.read1(65_536):
                pass

    def close(self) -> None:
        """Leave."""
        self._stop.set()
        for connection, _ in self._responses:
            if connection.sock is not None:
                connection.sock.close()
            connection.close()


class _Timed(Federation):
    """A federation whose coordinator notes the cost of its turns."""

    def _spawn(self, name: str, arguments: Any) -> None:
        if name == "coordinator":
            arguments = ["benchmarks.timed_coordinator", str(self.folder / "turns"), *arguments[1:]]
        super()._spawn(name, arguments)


def viewers(*, quick: bool) -> list[Figure]:
    """Rounds of 4 kB with and without ten viewers, in turn; the devices live in this process."""
    devices, pairs = (200, 2) if quick else (1000, 5)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    costs: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, _Timed(Path(folder), options=_PAGE) as federation:
        federation.start()
        federation.enrol(devices)
        fleet = LightFleet(federation.bundles.values(), Path(folder) / "parts")
        federation.wait_until(lambda: _turn(fleet) and fleet.num_online == devices, 240, poll_s=0)
        token = messages.ask(federation.state_dir, AddToken(name="bench")).token
        link = messages.ask(federation.state_dir, MakeLink()).url
        port, pid = int(link.partition("/#")[0].rpartition(":")[2]), federation.pid("coordinator")
        for number in range(2 * pairs + 1):  # the first one warms up
            watched = number % 2 == 1
            watching = _Viewers(port, token) if watched else None
            for _ in range(40):
                fleet.turn(0.05)
            began, before = time.monotonic(), cpu_s(pid)
            federation.run(
                run_file(hidden=SMALL, rounds=1, devices=devices), while_running=lambda: _turn(fleet), poll_s=0
            )
            if number:
                costs[watched].append(cpu_s(pid) - before)
                spans[watched].append((began, time.monotonic()))
            if watching is not None:
                watching.close()
                until = time.monotonic() + 31  # until the coordinator notices that nobody looks
                while time.monotonic() < until:
                    fleet.turn(0.05)
        federation.stop("coordinator")
        turns = [tuple(map(float, line.split())) for line in (Path(folder) / "turns").read_text().splitlines()]
        fleet.close()
    slowest = {
        watched: statistics.quantiles(
            [cost for end, cost in turns if any(low <= end <= high for low, high in spans[watched])], n=100
        )[98]
        for watched in (False, True)
    }
    ratios = tuple(one / other for one, other in zip(costs[True], costs[False], strict=True))
    whole = f"{_VIEWERS} viewers, {devices:,} devices"
    return [
        Figure(name=f"{whole}: CPU of a round, ratio", unit="", values=ratios, at_most=1.05),
        Figure(name=f"{whole}: CPU of a round without", unit="s", values=tuple(costs[False])),
        Figure(
            name=f"{whole}: CPU of a turn, p99 more", unit="ms", values=(slowest[True] - slowest[False],), at_most=10
        ),
        Figure(name=f"{whole}: CPU of a turn without, p99", unit="ms", values=(slowest[False],)),
    ]


def _turn(fleet: LightFleet) -> bool:
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        fleet.turn(0.05)
    return True
