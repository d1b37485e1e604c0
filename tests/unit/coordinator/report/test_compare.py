"""Simulations side by side: numbers by hand from small folders, and how they are written."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from folders import line, write_run

from coordinator.cli import main as cli
from coordinator.report import compare, compare_formats
from coordinator.report.compare import Comparison, Peak, Reached
from coordinator.results.run_folders import find_runs, read_run


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """FedAvg with two seeds, the second at twice the cost; FedProx with one; a seed that is not finished."""
    write_run(tmp_path / "avg-1", [line(1, 0.5), line(2, 0.7), line(3, 0.6, accuracy_per_device={"a": 0.1, "b": 0.9})])
    cost = {"bytes_up": 20, "bytes_down": 40, "seconds": 4.0}
    judged = {"accuracy_per_device": {"a": 0.7, "b": 0.3}}
    write_run(tmp_path / "avg-2", [line(1, 0.4, **cost), line(2, 0.6, **cost), line(3, 0.8, **cost, **judged)], seed=2)
    prox = [line(number, accuracy, loss=2.0 / number) for number, accuracy in ((1, 0.3), (2, 0.4), (3, 0.5))]
    what = {"method": "fedprox", "parameters": ", mu = 0.1", "rounds": "3"}
    write_run(tmp_path / "prox-1", prox, **what)
    write_run(tmp_path / "prox-2", [line(1, 0.9)], seed=2, finished=False, **what)
    return tmp_path


def compared(folder: Path, **options: Any) -> Comparison:
    return compare.compare([read_run(found) for found in find_runs([folder])], **options)


def test_runs_that_differ_in_the_seed_only_are_one_row(results: Path) -> None:
    """Last 0.6 and 0.8: mean 0.7, deviation 0.1 * sqrt(2); best 0.7 and 0.8; worst devices 0.1 and 0.3; mean costs."""
    found = compared(results)
    avg, prox = found.rows
    assert avg.settings == {"method.name": "fedavg"}
    assert (avg.seeds, prox.seeds) == ([1, 2], [1])
    assert avg.last is not None
    assert (avg.last.mean, avg.last.sd) == (pytest.approx(0.7), pytest.approx(0.1 * 2**0.5))
    assert avg.best is not None
    assert (avg.best.mean, avg.best.sd) == (pytest.approx(0.75), pytest.approx(0.05 * 2**0.5))
    assert avg.worst_device is not None
    assert (avg.worst_device.mean, avg.worst_device.sd) == (pytest.approx(0.2), pytest.approx(0.1 * 2**0.5))
    assert (avg.bytes_up, avg.bytes_down, avg.seconds) == ((30 + 60) / 2, (60 + 120) / 2, (6 + 12) / 2)
    assert (avg.num_rounds, avg.to_target) == (3, None)


def test_one_seed_has_no_spread(results: Path) -> None:
    """And no worst device, where devices did not judge."""
    prox = compared(results).rows[1]
    assert prox.last is not None
    assert (prox.last.mean, prox.last.sd, prox.worst_device) == (0.5, None, None)


def test_what_it_took_to_reach_a_target(results: Path) -> None:
    """0.7 in round 2 after 60 bytes and in round 3 after 180; 0.8 with seed 2 only; FedProx never."""
    avg, prox = compared(results, target=0.7).rows
    assert avg.to_target == Reached(num=2, rounds=2.5, bytes=120)
    assert prox.to_target == Reached(num=0, rounds=None, bytes=None)
    assert compared(results, target=0.8).rows[0].to_target == Reached(num=1, rounds=3, bytes=180)


def test_a_loss_is_better_when_it_is_lower(results: Path) -> None:
    """2, 1 and 2/3: the best is the last, and 1 was reached in round 2."""
    avg, prox = compared(results, metric="loss", target=1.0).rows
    assert (avg.last, avg.best) == (None, None)
    assert prox.best is not None
    assert prox.best.mean == pytest.approx(2 / 3)
    assert prox.to_target == Reached(num=1, rounds=2, bytes=60)


def test_the_peak_is_the_one_nearest_to_its_budget(results: Path) -> None:
    """4 of 10 MB are 40 %, 12 of 20 MB 60 %."""
    peak = compared(results).rows[0].peak
    assert peak == Peak(device="d0002", seed=1, peak_bytes=12_000_000, budget_bytes=20_000_000)
    assert peak.share == 0.6


def test_without_budgets_the_peak_is_the_highest(tmp_path: Path) -> None:
    """12 MB, of no budget."""
    folder = write_run(tmp_path / "r", [line(1, 0.5)])
    path = folder / "run.toml"
    path.write_text(path.read_text().replace(', training-budgets = ["10MB", "20MB"]', ""))
    assert compared(folder).rows[0].peak == Peak(device="d0002", seed=1, peak_bytes=12_000_000, budget_bytes=None)


def test_an_unfinished_run_is_listed_and_not_averaged(results: Path) -> None:
    """Its 0.9 is nowhere; how far it came is told."""
    found = compared(results)
    (left,) = found.left_out
    assert (left.folder, left.num_rounds, left.rounds_wanted, left.same_as) == (str(results / "prox-2"), 1, 3, "")
    assert all(0.9 not in row.last.values for row in found.rows if row.last is not None)


def test_the_same_run_twice_counts_once(tmp_path: Path) -> None:
    """Whatever it is called, and whichever way its numbers and the order of its keys are written."""
    write_run(tmp_path / "a", [line(1, 0.5)], method="fedprox", parameters=", mu = 1, x = 2")
    again = write_run(tmp_path / "b", [line(1, 0.6)], method="fedprox", parameters=", x = 2, mu = 1.0")
    (again / "run.toml").write_text((again / "run.toml").read_text().replace('name = "n"', 'name = "m"'))
    found = compared(tmp_path)
    assert [row.seeds for row in found.rows] == [[1]]
    (left,) = found.left_out
    assert (left.folder, left.same_as) == (str(tmp_path / "b"), str(tmp_path / "a"))


def test_columns_show_only_what_differs(tmp_path: Path) -> None:
    """The parameter, the partition and the rounds, beside the method; never the model, which all have."""
    write_run(tmp_path / "a", [line(1, 0.5)], method="fedprox", parameters=", mu = 0.1")
    write_run(tmp_path / "b", [line(1, 0.5)], method="fedprox", parameters=", mu = 1", simulate=', partition = "key"')
    write_run(tmp_path / "c", [line(1, 0.5), line(2, 0.5)], method="fedprox", parameters=", mu = 1")
    found = compared(tmp_path)
    heads = [column.head for column in compare_formats.columns(found)]
    assert heads[:4] == ["method", "mu", "stop.rounds", "partition"]
    assert heads[4:] == ["seeds", "rounds", "accuracy", "best", "up", "down", "peak", "time"]
    assert found.same["model.name"] == "mlp"
    assert "stop.rounds" not in found.same


def test_names_of_columns_are_clear() -> None:
    """The last word is enough unless two have it, or another column."""
    names = compare_formats.setting_names(["method.name", "method.lr", "train.lr", "train.batch", "stop.rounds"])
    assert list(names.values()) == ["method", "method.lr", "train.lr", "batch", "stop.rounds"]


def test_the_table_says_what_it_shows(results: Path) -> None:
    """Header with the kind of spread, a row per method, what is missing."""
    text = compare_formats.FORMATS["table"](compared(results, target=0.8))
    lines = text.splitlines()
    assert "mean ± standard deviation over the seeds (n - 1)" in lines[0]
    rows = [" ".join(found.split()) for found in lines if found.startswith("fed")]
    assert rows == [
        "fedavg - 2 3 0.7000 ± 0.1414 0.7500 ± 0.0707 0.2000 ± 0.1414 3 (1 of 2) 180 B (1 of 2) 45 B 90 B "
        "12.0 MB of 20.0 MB (60 %) 9 s",
        "fedprox 0.1 1 3 0.5000 0.5000 - never never 30 B 60 B 12.0 MB of 20.0 MB (60 %) 6 s",
    ]
    assert lines[-1] == f"{results / 'prox-2'}: not finished, 1 of 3 rounds; not in the numbers"


def test_markdown_marks_the_best(results: Path) -> None:
    """Accuracy high, bytes low; rows that show the same are not marked; letters with a meaning are escaped."""
    write_run(results / "x", [line(1, 0.5)], simulate=', partition = "file:/a|b*c_d"')
    text = compare_formats.FORMATS["md"](compared(results))
    head, rule, avg, prox, other, *_ = text.splitlines()
    assert head.startswith("| method | mu | stop.rounds | partition | seeds | rounds | accuracy | best | worst dev")
    assert rule == "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    assert "| **0.7000 ± 0.1414** | **0.7500 ± 0.0707** |" in avg
    assert "**" not in prox
    assert "| **10 B** | **20 B** | 12.0 MB of 20.0 MB (60 %) |" in other
    assert r"file:/a\|b\*c\_d" in other


def test_latex_is_a_table_with_rules(results: Path) -> None:
    """booktabs; what LaTeX would read as a command is escaped; the best is bold; the rest of the facts are comments."""
    write_run(results / "x", [line(1, 0.5)], simulate=', partition = "file:/a_b%{}~^\\\\"')
    lines = compare_formats.FORMATS["latex"](compared(results)).splitlines()
    code = [found for found in lines if not found.startswith("%")]
    assert code[0] == r"\begin{tabular}{llllrrrrrrrrr}"
    assert [code[1], code[3], *code[-2:]] == [r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"]
    assert r"\textbf{0.7000 $\pm$ 0.1414}" in code[4]
    assert r"(60 \%)" in code[4]
    assert r"file:/a\_b\%\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}" in code[6]
    assert all(found.endswith(r"\\") and found.count(" & ") == 12 for found in code[4:7])
    assert any("not finished" in found for found in lines if found.startswith("%"))


def test_csv_has_plain_numbers(results: Path) -> None:
    """Bytes and seconds without units; what is not known is empty."""
    text = compare_formats.FORMATS["csv"](compared(results, target=0.8))
    avg, prox = csv.DictReader(io.StringIO(text))
    assert (avg["method"], avg["mu"], prox["mu"]) == ("fedavg", "", "0.1")
    assert float(avg["accuracy_sd"]) == pytest.approx(0.1 * 2**0.5)
    assert [avg[key] for key in ("seeds_at_target", "rounds_to_target", "bytes_to_target")] == ["1", "3.0", "180.0"]
    assert [prox[key] for key in ("accuracy_sd", "rounds_to_target", "seeds_at_target")] == ["", "", "0"]
    assert (avg["peak_bytes"], avg["peak_budget_bytes"], avg["seconds"]) == ("12000000", "20000000", "9.0")


def test_the_command_prints_every_format(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has everything; what is not in a CSV is told beside it."""
    assert cli.main(["compare", str(results), "--format", "json", "--target", "0.7"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows"][0]["to_target"] == {"num": 2, "rounds": 2.5, "bytes": 120.0}
    assert data["rows"][0]["last"]["values"] == [0.6, 0.8]
    assert data["left_out"][0]["num_rounds"] == 1
    assert cli.main(["compare", str(results / "avg-1"), str(results / "prox-2"), "--format", "csv"]) == 0
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 2
    assert "prox-2: not finished" in told.err
    assert cli.main(["compare", str(results / "prox-2")]) == 0
    assert capsys.readouterr().out.startswith("no run is finished\n\n")


def test_the_command_says_what_is_wrong(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """7 for nothing there, 3 for a broken file or a target that nothing reaches."""
    (results / "empty").mkdir()
    assert cli.main(["compare", str(results / "empty")]) == 7
    assert "looked for folders with run.toml" in capsys.readouterr().err
    assert cli.main(["compare", str(results), "--target", "80"]) == 3
    assert "--target: expected 0 to 1 for accuracy, got 80" in capsys.readouterr().err
    (results / "avg-1/rounds.jsonl").write_text("?\n")
    assert cli.main(["compare", str(results)]) == 3
    assert f"{results / 'avg-1/rounds.jsonl'}, line 1: expected JSON" in capsys.readouterr().err


def test_a_value_that_not_every_seed_has_says_so(tmp_path: Path) -> None:
    """Seed 2 was never judged: the mean is that of one of two, without a spread."""
    write_run(tmp_path / "a", [line(1, 0.5)])
    write_run(tmp_path / "b", [line(1, None)], seed=2)
    columns = {column.head: column.cells for column in compare_formats.columns(compared(tmp_path))}
    assert columns["accuracy"] == ["0.5000 (1 of 2)"]
    assert columns["seeds"] == ["2"]
