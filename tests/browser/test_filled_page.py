"""The live page in a real browser, before a coordinator whose store knows a thousand devices and a run with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filled_store
import pytest
from fleet import Fleet
from page_client import PageClient, page_port
from rows import lease_row, round_row, run_file, run_row

from coordinator.store.base import Store

HOSTILE = "<img src=x onerror=alert(1)>\"'</script>"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageClient]:
    """A coordinator on a filled store; an older run has a hostile class, reason and log line."""
    folder: Path = tmp_path_factory.mktemp("filled")
    filled_store.fill(folder / "coordinator", devices=1000, first=_hostile_run)
    with Fleet(folder, start_options=("--page", "127.0.0.1:0")) as fleet:
        fleet.start_coordinator()
        yield PageClient(fleet.state_dir, page_port(fleet))


def _hostile_run(store: Store) -> None:
    store.runs.add(run_row("hostile-1", run_file(name="hostile", classes=[HOSTILE, "yes"])))
    store.rounds.open(round_row(run="hostile-1"), [lease_row(9001, "device-00007", run="hostile-1")])
    store.leases.set_state("lease-9001", "declined", code="bad_data", detail=HOSTILE, log=[HOSTILE, "x" * 64_000])
    store.runs.fail("hostile-1", HOSTILE)


def test_a_thousand_devices_are_found_sorted_and_paged(page: Any, client: PageClient) -> None:
    """Peaks are 50 to 99 % of budgets: 20 devices have 99 %, the first is device-00049; every tenth is line=b."""
    page.goto(client.link())
    page.get_by_text("1,000 offline").wait_for()
    page.keyboard.press("/")
    page.locator("table.devices").wait_for()
    assert page.locator("table.devices tbody tr").count() == 50
    page.get_by_text("1 to 50 of 1,000").wait_for()
    page.get_by_role("button", name="Next").click()
    page.get_by_text("51 to 100 of 1,000").wait_for()
    names = page.locator("td.name")
    assert names.first.inner_text() == "device-00050"
    page.get_by_role("button", name="Peak, as a share of the budget").click()
    page.get_by_role("button", name="Peak, as a share of the budget ↑").click()
    page.locator("tbody tr:first-child td.name", has_text="device-00049").wait_for()
    page.locator("#find").fill("0042")
    page.get_by_text("11 of 1,000 devices").wait_for()  # 00042, and 00420 to 00429
    page.locator("#find").fill("")
    page.locator("select").nth(1).select_option("line=b")
    page.get_by_text("100 of 1,000 devices").wait_for()
    assert page.evaluate("document.activeElement.id") == "find"  # after all those changes of the table


def test_a_long_name_and_hostile_texts_stay_texts(page: Any, client: PageClient) -> None:
    """Classes, reasons, details and log lines are text; lines of 64,000 characters do not widen a phone's page."""
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(client.link())
    base = page.url.partition("#")[0]
    for view in ("#/run/hostile-1", "#/devices/device-00007", "#/logs"):
        page.goto(base + view)
        page.locator("h1").wait_for()
        if view == "#/logs":
            page.locator("select").first.select_option("devices")
        page.get_by_text(HOSTILE).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.locator("img").count() == 0


def test_the_overview_of_a_thousand_devices_is_small(page: Any, client: PageClient) -> None:
    """What a browser receives until the first view stands: at most 150 kB."""
    sizes: list[int] = []
    page.on("requestfinished", lambda request: sizes.append(sum(request.sizes()[key] for key in _RECEIVED)))
    page.goto(client.link())
    page.get_by_text("Nearest to their budget").wait_for()
    page.wait_for_timeout(300)
    assert 10_000 < sum(sizes) <= 150_000


_RECEIVED = ("responseBodySize", "responseHeadersSize")
