"""The plan that a worker trains by, and its limits: each test starts real processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from worker_runs import (
    image_run,
    make_work,
    npz_images,
    read_error,
    read_update,
    run_worker,
)

from edge_client.records import TrainingPlan, from_map
from edge_client.worker import live_files


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is the Linux kernel's")
def test_a_plan_beyond_the_budget_fails_cleanly_with_75(tmp_path: Path) -> None:
    """512 samples at once need 229 MB of activations; the budget leaves 30 MB. What was tried is told."""
    plan = {"microbatch": 512, "budget_bytes": 290_000_000, "predicted_bytes": 290_000_000, "training_bytes": 7}
    device = npz_images(tmp_path)
    work = make_work(
        tmp_path / "w",
        run=image_run(512),
        device_file=device,
        budget_bytes=290_000_000,
        plan=plan,
        evaluate=False,
    )
    assert run_worker(work) == 75
    assert not (work / "update.bin").exists()
    assert read_error(work)["code"] == "over_budget"
    trial = live_files.read_trial(work)
    assert trial is not None
    assert (trial.budget_bytes, trial.plan) == (290_000_000, from_map(TrainingPlan, plan))


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_a_worker_that_is_told_of_less_memory_shrinks_its_plan_and_stays_below(tmp_path: Path) -> None:
    """128 samples at once need about 320 MB, and there are 500; then 305, before the first batch: fewer at a time."""
    work = make_work(tmp_path / "w", run=image_run(128), device_file=npz_images(tmp_path), budget_bytes=500_000_000)
    live_files.write_budget(work, 305_000_000)
    assert run_worker(work) == 0, (work / "stderr").read_text()
    report, _ = read_update(work)
    assert report.plan is not None
    assert (report.plan.budget_bytes, report.scalars["replans"]) == (305_000_000, 1.0)
    assert report.plan.microbatch < 128
    assert 250_000_000 < report.peak_bytes <= 305_000_000
    trial = live_files.read_trial(work)
    assert trial is not None
    assert (trial.plan, trial.budget_bytes) == (report.plan, 305_000_000)


def test_a_worker_goes_on_as_it_is_when_its_plan_fits_less_memory_or_nothing_does(tmp_path: Path) -> None:
    """600 MB are enough for its plan: only the limit changes. In 100 MB nothing fits: that is said, and no more."""
    options: dict[str, Any] = {"run": image_run(128), "device_file": npz_images(tmp_path), "budget_bytes": 10**9}
    for told, expected in ((600_000_000, 600_000_000), (100_000_000, 10**9)):
        work = make_work(tmp_path / str(told), **options)
        live_files.write_budget(work, told)
        assert run_worker(work) == 0, (work / "stderr").read_text()
        report, _ = read_update(work)
        assert report.plan is not None
        assert (report.plan.microbatch, report.plan.budget_bytes) == (128, expected)
        assert report.scalars["replans"] == 0.0
        assert ("no smaller plan fits" in (work / "stderr").read_text()) == (told == 100_000_000)


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
@pytest.mark.parametrize("batch", [1, 32, 128])
def test_the_measured_peak_stays_below_the_prediction(tmp_path: Path, batch: int) -> None:
    """The worker plans for its own budget, trains inside it under the limit, and reports its VmHWM."""
    work = make_work(tmp_path / "w", run=image_run(batch), device_file=npz_images(tmp_path), budget_bytes=10**9)
    assert run_worker(work) == 0
    report, _ = read_update(work)
    assert report.plan is not None
    assert report.plan.microbatch == batch
    assert 0 < report.base_bytes <= report.peak_bytes <= report.plan.predicted_bytes
