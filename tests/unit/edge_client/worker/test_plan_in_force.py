"""The plan that a worker trains by, and its limits: each test starts real processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from worker_runs import (
    TASK,
    change_order,
    image_run,
    make_task_work,
    make_work,
    npz_images,
    read_error,
    read_update,
    run_worker,
)

from edge_client.worker import live_files


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is the Linux kernel's")
def test_a_plan_beyond_the_budget_is_noticed_before_anything_depends_on_it(tmp_path: Path) -> None:
    """512 samples at once need 229 MB of activations; the budget leaves 40 MB. The rehearsal finds another plan.

    The second worker does not rehearse: it finds what the first one measured.
    """
    plan = {"microbatch": 512, "budget_bytes": 200_000_000, "predicted_bytes": 0, "training_bytes": 7}
    options: dict[str, Any] = {"device_file": npz_images(tmp_path), "budget_bytes": 200_000_000, "evaluate": False}
    plans = []
    for name in ("first", "second"):
        work = make_work(tmp_path / name, run=image_run(512), plan=plan, **options)
        assert run_worker(work) == 0, (work / "stderr").read_text()
        report, _ = read_update(work)
        assert report.plan is not None
        assert report.plan.microbatch < 512
        assert report.private_peak_bytes <= report.plan.private_predicted_bytes <= 200_000_000
        assert "plan: full, microbatch 512 needs more than " in (work / "stderr").read_text()
        assert report.phases is not None
        assert ("rehearse" in report.phases) == (name == "first")
        plans.append(report.plan.microbatch)
    assert plans[0] == plans[1]


GROWS_LATER = TASK.replace("nn.Linear(4, num_classes)", "Head(4, num_classes)").replace(
    "class Net",
    """class Head(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += self.training
        if self.calls > 30:
            self.more = torch.ones(100_000_000)
        return super().forward(x)

class Net""",
)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is the Linux kernel's")
def test_a_worker_that_exceeds_its_budget_in_the_end_fails_cleanly_with_75(tmp_path: Path) -> None:
    """A model that takes 400 MB from its 31st pass on, which no rehearsal sees. What was tried is told."""
    work = change_order(make_task_work(tmp_path / "w", GROWS_LATER), budget_bytes=400_000_000)
    assert run_worker(work) == 75, (work / "stderr").read_text()
    assert not (work / "update.bin").exists()
    assert read_error(work)["code"] == "over_budget"
    trial = live_files.read_trial(work)
    assert trial is not None
    assert (trial.budget_bytes, trial.plan.microbatch) == (400_000_000, 8)


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_a_worker_that_is_told_of_less_memory_shrinks_its_plan_and_stays_below(tmp_path: Path) -> None:
    """128 samples at once need about 215 MB, and there are 400; then 198, before the first batch: fewer at a time."""
    work = make_work(tmp_path / "w", run=image_run(128), device_file=npz_images(tmp_path), budget_bytes=400_000_000)
    live_files.write_budget(work, 198_000_000)
    assert run_worker(work) == 0, (work / "stderr").read_text()
    report, _ = read_update(work)
    assert report.plan is not None
    assert (report.plan.private_budget_bytes, report.scalars["replans"]) == (198_000_000, 1.0)
    assert report.plan.microbatch < 128
    assert 150_000_000 < report.private_peak_bytes <= 198_000_000
    trial = live_files.read_trial(work)
    assert trial is not None
    assert (trial.plan.microbatch, trial.budget_bytes) == (report.plan.microbatch, 198_000_000)


def test_a_worker_goes_on_as_it_is_when_its_plan_fits_less_memory_or_nothing_does(tmp_path: Path) -> None:
    """600 MB are enough for its plan: only the limit changes. In 100 MB nothing fits: that is said, and no more."""
    options: dict[str, Any] = {"run": image_run(128), "device_file": npz_images(tmp_path), "budget_bytes": 10**9}
    for told, expected in ((600_000_000, 600_000_000), (100_000_000, 10**9)):
        work = make_work(tmp_path / str(told), **options)
        live_files.write_budget(work, told)
        assert run_worker(work) == 0, (work / "stderr").read_text()
        report, _ = read_update(work)
        assert report.plan is not None
        assert (report.plan.microbatch, report.plan.private_budget_bytes) == (128, expected)
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
    assert 0 < report.private_base_bytes <= report.private_peak_bytes <= report.plan.private_predicted_bytes
    assert report.private_peak_bytes <= report.peak_bytes <= report.plan.predicted_bytes  # of RSS
