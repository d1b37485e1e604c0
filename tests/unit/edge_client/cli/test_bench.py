"""`edge-client bench`: real plans of a small model, measured in processes of their own; its table and its picture."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from rows import run_file
from typed import typed

from edge_client.cli import bench_command
from edge_client.cli.bench_command import Bench, BudgetResult
from edge_client.measuring.plan_from_options import Subject
from edge_client.measuring.trial import TrialResult
from edge_client.records import PlanRules, TrainingPlan

MODEL = ("--model", "small-cnn", "--input", "1x28x28", "--batch", "32")


def _png_size(data: bytes) -> tuple[int, ...]:
    """Width and height, as the PNG's first chunk has them."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_each_plan_is_measured_inside_its_budget(tmp_path: Path) -> None:
    """All at once takes about 15 MB: it is measured, and is the plan for 1 GB as well; 8 MB need another; 1 kB none."""
    done = typed("edge_client", "bench", *MODEL, "--budgets", "8MB,1GB,1kB", "--out", tmp_path / "b", "--format=json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads((tmp_path / "b/bench.json").read_text()) == found
    whole, large, small, none = found["plans"]
    assert [plan["budget_bytes"] for plan in found["plans"][1:]] == [10**9, 8 * 10**6, 1000]
    assert whole["plan"]["microbatch"] == 32
    assert whole["relative_time"] == 1
    assert large["measured_bytes"] == whole["measured_bytes"]
    for plan in (whole, small):
        assert 10**6 < plan["measured_bytes"] <= plan["predicted_bytes"] <= plan["budget_bytes"]
    assert small["plan"]["microbatch"] < 32
    assert small["relative_time"] > 0
    assert (none["plan"], none["measured_bytes"], none["relative_time"]) == (None, None, None)
    assert none["note"].startswith("nothing fits: training needs ")
    width, height = _png_size((tmp_path / "b/bench.png").read_bytes())
    assert width > height > 300


@pytest.mark.parametrize("budgets", ["0", "-1MB", "1XB", "1MB,,2MB"])
def test_a_budget_that_makes_no_sense_is_refused_before_anything_is_measured(tmp_path: Path, budgets: str) -> None:
    """Exit code 3, and nothing is written."""
    done = typed("edge_client", "bench", *MODEL, f"--budgets={budgets}", "--out", tmp_path / "b")
    assert done.returncode == 3
    assert "--budgets: expected" in done.stderr
    assert not (tmp_path / "b").exists()


def _made(*results: BudgetResult) -> Bench:
    what = Subject(run=run_file(), rules=PlanRules(), input_shape=(1, 2, 2), task=None)
    return Bench(what=what, device="a board", device_bytes=10**9, base_bytes=250 * 10**6, results=results)


def _result(budget_mb: int, peak_mb: int, seconds: float, **plan: Any) -> BudgetResult:
    fields: dict[str, Any] = {"microbatch": 32, "budget_bytes": 0, "predicted_bytes": 0, "training_bytes": 90 * 10**6}
    return BudgetResult(
        budget_bytes=budget_mb * 10**6,
        plan=TrainingPlan(**fields | plan),
        measured=TrialResult(base_bytes=250 * 10**6, peak_bytes=peak_mb * 10**6, seconds=(2 * seconds, seconds)),
        whole_seconds=0.5,
    )


def test_the_table_has_a_line_per_budget() -> None:
    """80 of 100 MB; 30 of 40 MB in one and a half times the time, which is the shortest that was measured."""
    groups = _result(40, 30, 0.75, groups=(("a",), ("b",)), microbatch=8)
    none = BudgetResult(budget_bytes=1000, plan=None, note="nothing fits: training needs 2.0 MB at least")
    lines = bench_command.describe(_made(_result(100, 80, 0.5), groups, none)).splitlines()
    assert lines[0] == "mlp, batch 32, fedavg, on a board"
    assert lines[3].split() == ["100", "MB", "full,", "microbatch", "32", "90.0", "MB", "80.0", "MB", "80", "%", "1.00"]
    assert lines[4].split()[2:] == ["2", "groups,", "microbatch", "8", "90.0", "MB", "30.0", "MB", "75", "%", "1.50"]
    assert lines[5].endswith("nothing fits: training needs 2.0 MB at least")


def test_a_picture_is_drawn_whatever_was_measured(tmp_path: Path) -> None:
    """More lines make it higher; a peak over its budget and a plan that was not tried have their place as well."""
    not_tried = BudgetResult(
        budget_bytes=10**9, plan=_result(1, 1, 1).plan, note="not tried: more than this device has"
    )
    few, many = _made(_result(100, 80, 0.5)), _made(not_tried, _result(100, 120, 0.5), _result(40, 30, 0.75))
    heights = []
    for number, bench in enumerate((few, many)):
        told = bench_command.write(bench, tmp_path / str(number))
        assert told == [f"wrote {tmp_path / str(number) / 'bench.json'} and bench.png"]
        heights.append(_png_size((tmp_path / str(number) / "bench.png").read_bytes())[1])
    assert heights[0] < heights[1]
