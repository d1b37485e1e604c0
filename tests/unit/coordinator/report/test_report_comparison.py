"""The page about several simulations: a line per method, the same numbers as `coordinator compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from folders import line, write_run
from page import Page

from coordinator.cli import main as cli
from coordinator.report import comparison_page as report_comparison
from coordinator.results.run_folders import find_runs, read_run

EVIL = "<b onclick='x'>&$x_{"


def rendered(folder: Path) -> Page:
    return Page(report_comparison.render("grid", [read_run(found) for found in find_runs([folder])]))


def test_a_folder_of_simulations_is_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mean 0.7 ± 0.1414 of 0.6 and 0.8; plots of accuracy, bytes and memory; what is not finished; all in one file."""
    write_run(tmp_path / "grid/a-1", [line(1, 0.5), line(2, 0.6)])
    write_run(tmp_path / "grid/a-2", [line(1, 0.5), line(2, 0.8)], seed=2)
    write_run(tmp_path / "grid/b-1", [line(1, 0.4), line(2, 0.5)], method="fedprox", parameters=", mu = 0.1")
    write_run(tmp_path / "grid/b-2", [line(1, 0.9)], method="fedprox", finished=False, seed=2, rounds="2")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "report", "grid"]) == 0
    assert capsys.readouterr().out == "grid.html\n"
    page = Page((tmp_path / "grid.html").read_text(encoding="utf-8"))
    assert list(page.images()) == [
        "accuracy of each method after each round",
        "bytes moved by each method over the rounds",
        "accuracy of each method over the bytes moved",
        "peaks, predictions and budgets",
    ]
    for image in page.images().values():
        image.load()
    for piece in ("0.7000 ± 0.1414", "fedprox, mu 0.1", "2 groups", "b-2: not finished, 1 of 2 rounds", "(60 %)"):
        assert piece in page.text
    assert 'data = "digits"' in page.text
    assert "\nmu = " not in page.text
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "iframe", "object")]


def test_lines_end_where_a_seed_ends(tmp_path: Path) -> None:
    """Seed 2 stopped after one round: there the mean is 0.5 with a deviation of 0.1 * sqrt(2), and there is no more."""
    write_run(tmp_path / "a-1", [line(1, 0.4), line(2, 0.9)], rounds="2")
    write_run(tmp_path / "a-2", [line(1, 0.6)], seed=2, rounds="2")
    runs = [read_run(found) for found in find_runs([tmp_path])]
    entry = report_comparison._Entry("a", runs, None)  # type: ignore[arg-type]
    curve = report_comparison._mean(entry, report_comparison._accuracies)
    assert curve.points == [(0, 0.25), (1, pytest.approx(0.5))]
    assert curve.spread == [0.0, pytest.approx(0.1 * 2**0.5)]


def test_architectures_have_a_panel_each_or_a_line_each(tmp_path: Path) -> None:
    """Of two methods the picture is higher than of one: two panels, not one."""
    both: dict[str, Any] = {"devices": [], "accuracy_per_architecture": {"small": 0.25, "large": 0.5}}
    write_run(tmp_path / "a", [line(1, 0.5, **both)])
    write_run(tmp_path / "b", [line(1, 0.5, **both)], seed=2)
    one = rendered(tmp_path).images()["accuracy of each architecture"]
    write_run(tmp_path / "c", [line(1, 0.5, **both)], method="fedprox")
    two = rendered(tmp_path).images()["accuracy of each architecture"]
    assert two.height > one.height


def test_many_rows_are_cut_in_the_plots_only(tmp_path: Path) -> None:
    """Of 14 the plots show 12, and say so; the table has all."""
    for number in range(14):
        told = [line(1, number / 20, devices=[])]
        write_run(tmp_path / f"r-{number}", told, method="fedprox", parameters=f", mu = {number}")
    page = rendered(tmp_path)
    assert "the plots show the 12 rows with the highest accuracy" in page.text
    assert all(f"fedprox, mu {number}" in page.text for number in range(14))


def test_what_files_say_stays_text(tmp_path: Path) -> None:
    """Plans, architectures, partitions."""
    devices = [{"device": "d0001", "plan": EVIL, "peak": 2 * 10**6}]
    told = {"accuracy_per_architecture": {EVIL: 0.5, "b": 0.5}, "devices": devices}
    write_run(tmp_path / "a", [line(1, 0.5, **told)])
    write_run(tmp_path / "b", [line(1, 0.5)], simulate=f', partition = "file:{EVIL}"')
    page = rendered(tmp_path)
    assert "onclick" not in {name for _, attributes in page.tags for name in attributes}
    assert page.text.count(EVIL) >= 3


def test_nothing_finished_is_a_page_too(tmp_path: Path) -> None:
    """It says so, and has no plots."""
    write_run(tmp_path / "a", [line(1, 0.5)], finished=False)
    write_run(tmp_path / "b", [line(1, 0.5)], finished=False, seed=2)
    page = rendered(tmp_path)
    assert page.text.count("not finished, 1 of 1 rounds") == 2
    assert page.images() == {}
