"""Workers on the test accelerator: both memories are planned, kept and reported; a refusal ends in a smaller plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerated import environment, needs_test_accelerator
from worker_runs import image_run, make_work, npz_images, read_error, read_update, run_worker

from edge_client.client.events import WorkerFailed
from edge_client.client.worker_outcome import outcome
from edge_client.records import Report
from edge_client.worker import exit_codes, live_files

pytestmark = needs_test_accelerator()

MIB = 2**20
CONTEXT = 30 * MIB


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and sequences are measured once."""
    return tmp_path_factory.mktemp("cache")


def _work(folder: Path, name: str, limits: dict[str, Any], **order: Any) -> Path:
    device = npz_images(folder) | {"limits": {"memory": 10**10, "accelerator": "fedtest:0"} | limits}
    return make_work(folder / name, run=image_run(batch=128), device_file=device, evaluate=False, **order)


def _environment(cache: Path, **more: str) -> dict[str, str]:
    own = environment()
    wanted = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    return (
        {name: own[name] for name in wanted}
        | {
            "FEDFIT_CACHE_DIR": str(cache),
            "FEDTEST_CONTEXT": str(CONTEXT),
        }
        | more
    )


def _trained(work: Path, environment: dict[str, str]) -> Report:
    assert run_worker(work, **environment) == exit_codes.DONE, (work / "stderr").read_text()
    return read_update(work)[0]


def test_a_plan_stays_inside_of_the_budget_of_the_accelerator(tmp_path: Path, cache: Path) -> None:
    """Without a budget the batch of 128 is whole; with one of two thirds of what that took, it is not.

    The context of 30 MiB is measured and counted. The promise after a rehearsal is the measured peak and 2 %.
    """
    whole = _trained(_work(tmp_path, "whole", {}), _environment(cache))
    assert whole.plan is not None
    assert whole.plan.microbatch == 128
    assert whole.plan.accelerator.startswith("fedtest, test accelerator (discrete)")
    reserved = whole.accelerator_peak_bytes - CONTEXT
    assert whole.plan.accelerator_predicted_bytes == int(reserved * 1.02) + CONTEXT
    assert whole.accelerator_base_bytes >= CONTEXT

    budget = CONTEXT + reserved * 2 // 3
    small = _trained(_work(tmp_path, "small", {"accelerator_memory": budget}), _environment(cache))
    assert small.plan is not None
    assert small.plan.accelerator_budget_bytes == budget
    assert small.accelerator_peak_bytes <= small.plan.accelerator_predicted_bytes <= budget
    assert small.plan.describe() != whole.plan.describe()


def test_what_the_accelerator_refuses_is_a_ceiling_for_the_next_plan(tmp_path: Path, cache: Path) -> None:
    """The limit that torch enforces is halved behind the plan's back: exit code 75, and the ceiling is the plan's.

    A second worker of the lease gets it, as from the daemon, and trains by a smaller plan.
    """
    work = _work(tmp_path, "refused", {"accelerator_memory": 300 * MIB})
    code = run_worker(work, **_environment(cache, FEDFIT_FAULT="halve:accelerator.limit,halve:accelerator.limit:2"))
    assert code == exit_codes.OVER_BUDGET, (work / "stderr").read_text()
    assert read_error(work)["code"] == "over_budget"
    failed = outcome("l1", work, code)
    assert isinstance(failed, WorkerFailed)
    assert failed.exceeded is not None
    assert (failed.exceeded.memory, failed.exceeded.budget_bytes) == ("accelerator", 300 * MIB)
    trial = live_files.read_trial(work)
    assert trial is not None
    assert failed.exceeded.training_bytes == trial.plan.training_bytes

    again = _work(
        tmp_path, "again", {"accelerator_memory": 300 * MIB}, ceiling_bytes=failed.exceeded.training_bytes, replans=1
    )
    report = _trained(again, _environment(cache))
    assert report.plan is not None
    assert report.plan.training_bytes < failed.exceeded.training_bytes


@pytest.mark.parametrize(
    ("limits", "code", "says"),
    [
        (
            {"accelerator": "fedtest:3"},
            "no_accelerator",
            "this device has 2 of the kind 'fedtest' (fedtest:0, fedtest:1)",
        ),
        ({"accelerator_memory": 20 * MIB}, "nothing_fits", "which is less than the 3"),
        (
            {"accelerator": "fedtest:1", "accelerator_memory": 10**9},
            "no_accelerator",
            "limits.accelerator-memory: fedtest shares the host's memory; remove it, and set limits.memory",
        ),
    ],
    ids=("index", "context", "unified"),
)
def test_what_cannot_be_is_declined_in_one_line(
    tmp_path: Path, cache: Path, limits: dict[str, Any], code: str, says: str
) -> None:
    """With what to do."""
    work = _work(tmp_path, "bad", limits)
    assert run_worker(work, **_environment(cache)) == exit_codes.DECLINED, (work / "stderr").read_text()
    error = json.loads((work / "error.json").read_text())
    assert error["code"] == code
    assert says in error["detail"]
    assert "\n" not in error["detail"]


def test_a_unified_device_has_one_sum(tmp_path: Path, cache: Path) -> None:
    """What is predicted of both memories is inside of the host's budget, and the daemon learns what it cannot see."""
    work = _work(tmp_path, "unified", {"accelerator": "fedtest:1", "memory": 10**9}, budget_bytes=10**9)
    report = _trained(work, _environment(cache))
    assert report.plan is not None
    assert report.plan.accelerator.startswith("fedtest, test accelerator (unified)")
    assert report.plan.accelerator_predicted_bytes == 0
    assert report.plan.predicted_bytes <= 10**9
    assert live_files.read_use(work) >= CONTEXT
