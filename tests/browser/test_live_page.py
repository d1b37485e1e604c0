"""The live page in a real browser, before a fleet of real processes."""

from __future__ import annotations

import importlib.resources
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet, mlp_run
from page_client import PageClient, page_port

VIEWS = {  # and what the window is called once they are shown; a run's is its name
    "#/": "Overview",
    "#/run": "test-",
    "#/devices": "Devices",
    "#/devices/b": "b",
    "#/compare": "Compare",
    "#/logs": "Logs",
    "#/settings": "Settings",
}
PATIENCE_S = 240.0  # two cores have three devices, a browser and other tests; only a failure waits so long
HOSTILE = "<img src=x onerror=alert(1)>\"'‮evil"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator with its page, and the devices a, b and c."""
    folder = tmp_path_factory.mktemp("fleet")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]  # the same after a restart
    with Fleet(folder, start_options=("--page", f"127.0.0.1:{port}")) as started:
        started.start_coordinator()
        started.add_devices("a", "b", "c")
        for name in ("a", "b", "c"):
            started.start_device(name)
        started.wait_until(
            lambda: len((started.ask("status") or {"online": []})["online"]) == 3, PATIENCE_S, "three devices"
        )
        yield started


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> PageClient:
    """The API of that coordinator."""
    return PageClient(fleet.state_dir, page_port(fleet))


def _heading(page: Any, pattern: str) -> None:
    page.locator("h1", has_text=re.compile(pattern)).wait_for(timeout=1000 * PATIENCE_S)


def _open(page: Any, view: str, title: str) -> None:
    """Go to a view and wait until it is there: the view before it stays until the new one has its data."""
    page.goto(page.url.partition("#")[0] + view)
    page.wait_for_function("title => document.title.startsWith(title)", arg=title, timeout=1000 * PATIENCE_S)


def _run(fleet: Fleet, *, rounds: int, steps: int, **changes: Any) -> str:
    file = mlp_run(rounds=rounds, devices=2, train={"max-steps": steps}, evaluate={"every": 1}, **changes)
    return fleet.start_run(file)


def test_a_run_is_watched_from_start_to_end_while_a_device_dies_and_returns(
    page: Any, fleet: Fleet, client: PageClient
) -> None:
    """Nothing is reloaded; at the end the page has the numbers of `run show --format json`.

    b dies as soon as it has its part of the first round, which stays open until b returns, however slow the browser is.
    """
    page.goto(client.link())
    _heading(page, "No run yet")
    assert page.url.endswith("#/")  # the secret of the link is gone from the address
    page.evaluate("window.isTheSame = true")
    run = _run(fleet, rounds=3, steps=200)
    fleet.wait_until(lambda: f"run {run} round 1: assigned" in fleet.log("b"), PATIENCE_S, "b is asked")
    fleet.kill("b")
    _heading(page, rf"{run} is training: round 1 of 3")
    page.get_by_text("This round, device by device").wait_for()
    page.locator(".alerts li", has_text="b is offline").wait_for()
    page.locator(".lead", has_text="one needs you").wait_for()
    fleet.start_device("b")
    page.locator(".alerts li", has_text="b is offline").wait_for(state="detached")
    _heading(page, rf"{run} has finished after 3 rounds")
    assert page.evaluate("window.isTheSame") is True
    _assert_the_numbers_of_run_show(page, fleet, run)


def _assert_the_numbers_of_run_show(page: Any, fleet: Fleet, run: str) -> None:
    shown = fleet.show(run)
    _open(page, f"#/run/{run}", run)
    page.locator("summary", has_text="Show the numbers").click()
    rows = [
        [cell.strip() for cell in row.inner_text().split("\t")] for row in page.locator("details table tbody tr").all()
    ]
    expected = [
        [
            "start" if result["version"] == 0 else str(result["version"]),
            f"{result['accuracy']:.4f}",
            f"{result['macro_f1']:.4f}",
            f"{result['loss']:.4f}",
            str(result["num_devices"]),
        ]
        for result in reversed(shown["evaluations"])
    ]
    assert [row[:5] for row in rows] == expected
    recalls = (
        page.locator("table", has=page.get_by_text("Recall per class")).locator("tbody tr td.num").all_inner_texts()
    )
    assert recalls == ["\u2013" if value is None else f"{value:.3f}" for value in shown["evaluations"][-1]["recall"]]
    _open(page, "#/", "Overview")
    bars = {
        label.partition(":")[0]: label
        for label in page.locator("svg.memory").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    }
    for device in shown["devices"]:
        peak, predicted, budget = (device[key] for key in ("peak_bytes", "predicted_bytes", "budget_bytes"))
        sizes = f"peak {round(peak / 1e6)} MB, predicted {round(predicted / 1e6)} MB, budget {budget / 1e9:.1f} GB"
        assert bars[device["id"]] == f"{device['id']}: {sizes}"


def test_a_run_is_stopped_with_the_keyboard_alone(page: Any, fleet: Fleet, client: PageClient) -> None:
    """Tab to Stop, Enter, Tab to the answer, Enter: the run ends after its round, and its model is kept."""
    page.goto(client.link())
    run = _run(fleet, rounds=1000, steps=20)  # it does not end by itself while the browser is slow
    _heading(page, rf"{run} is training: round [2-9]")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Stop":
            break
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=f"Stop {run}?").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "Stop after this round"
    page.keyboard.press("Enter")
    _heading(page, rf"{run} was stopped after")
    fleet.wait_until(lambda: fleet.show(run)["state"] == "stopped", PATIENCE_S, "the run has stopped")
    _open(page, "#/settings", "Settings")
    page.get_by_role("cell", name=f"stop {run}").wait_for()  # who did what is on record


def test_a_link_signs_in_once_and_one_to_read_shows_no_buttons(chromium: Any, client: PageClient) -> None:
    """The second browser is told what to type; whoever may only look has nothing to press."""
    link = client.link("read")
    for is_first in (True, False):
        context = chromium.new_context()
        context.set_default_timeout(1000 * PATIENCE_S)
        page = context.new_page()
        page.goto(link)
        if is_first:
            page.get_by_text("Fleet now").wait_for()
            assert page.locator(".acts button").count() == 0
        else:
            page.get_by_text("this link was used or is too old").wait_for()
            page.locator("#secret").fill(client.link("read"))
            page.get_by_role("button", name="Sign in").click()
            page.get_by_text("Fleet now").wait_for()
        context.close()


def test_nothing_that_comes_from_outside_runs_in_the_browser(page: Any, fleet: Fleet, client: PageClient) -> None:
    """A label, a class and a reason with HTML, quotes and a change of direction are shown as text."""
    fleet.ask("device-label", name="c", put={"line": HOSTILE})
    run = fleet.start_run(mlp_run(rounds=1, devices=1, where=[f"line={HOSTILE}"], evaluate={"every": 1}))
    page.goto(client.link())
    _heading(page, rf"{run} has finished")
    base = page.url.partition("#")[0]
    shown = HOSTILE.replace("‮", "?")
    page.goto(f"{base}#/devices/c")
    page.get_by_text(f"line={shown}", exact=True).wait_for()
    page.goto(f"{base}#/devices")
    page.locator("option", has_text=f"line={shown}").wait_for(state="attached")
    page.goto(f"{base}#/devices/%3Cimg%20src=x%20onerror=alert(1)%3E")
    _heading(page, "Not found|This did not work")
    assert page.locator("img").count() == 0


def test_the_focus_and_an_open_table_stay_through_many_updates(page: Any, fleet: Fleet, client: PageClient) -> None:
    """Twenty changes of a device's label are shown; the summary keeps the focus and stays open."""
    fleet.ask("device-label", name="a", put={"turn": "0"})
    page.goto(client.link())
    page.get_by_text("Fleet now").wait_for()
    _open(page, "#/run", "test-")
    summary = page.locator("summary", has_text="Show the numbers")
    summary.click()
    page.evaluate("document.querySelector('summary').mark = 7")
    for number in range(1, 21):
        fleet.ask("device-label", name="a", put={"turn": str(number)})
        page.wait_for_timeout(120)
    assert page.evaluate("document.activeElement.mark") == 7
    assert page.locator("details[open] table").first.is_visible()
    _open(page, "#/devices/a", "a")
    page.get_by_text("turn=20").wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_in_any_view(page: Any, client: PageClient, theme: str, fleet: Fleet) -> None:
    """Contrast, names, order and roles, in both themes; at 390 pixels nothing is wider than the screen."""
    pytest.importorskip("axe_core_python")
    script = importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    page.emulate_media(color_scheme=theme)
    page.goto(client.link("operate"))
    page.get_by_text("Fleet now").wait_for()
    found = []
    for view, title in VIEWS.items():
        _open(page, view, title)
        page.wait_for_timeout(150)
        result = page.evaluate(
            f"async () => {{ {script}; return await axe.run(document, {{resultTypes: ['violations']}}); }}"
        )
        found += [f"{view}: {one['id']}: {one['nodes'][0]['html'][:120]}" for one in result["violations"]]
        page.set_viewport_size({"width": 390, "height": 800})
        page.wait_for_timeout(100)
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            found.append(f"{view}: wider than 390 pixels")
        page.set_viewport_size({"width": 1280, "height": 900})
    assert found == []


def test_the_page_comes_back_with_the_coordinator(page: Any, fleet: Fleet, client: PageClient) -> None:
    """Killed and started again: what was there stays, its age shows, and it goes on without a reload or a new link."""
    page.goto(client.link())
    page.get_by_text("Fleet now").wait_for()
    page.locator("#live", has_text="Live").wait_for()
    page.evaluate("window.isTheSame = true")
    fleet.kill("coordinator")
    page.locator("#live.stale", has_text="Last update").wait_for()
    assert page.get_by_text("Fleet now").is_visible()
    fleet.start_coordinator()
    page.locator("#live:not(.stale)", has_text="Live").wait_for()
    fleet.wait_until(lambda: len((fleet.ask("status") or {"online": []})["online"]) == 3, PATIENCE_S, "three devices")
    page.locator(".counts", has_text="3 idle").wait_for()
    assert page.evaluate("window.isTheSame") is True
