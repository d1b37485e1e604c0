"""Memory that a worker keeps from batch to batch: the rule, and what it changes in a real worker."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor
from worker_runs import image_run, make_work, npz_images, read_update, run_worker

from edge_client.records import Report, TrainingPlan
from edge_client.worker.spare_memory import with_spare, without_spare

_MIB = 2**20
_PLAN = TrainingPlan(
    microbatch=32,
    budget_bytes=400 * _MIB,
    predicted_bytes=250 * _MIB,
    training_bytes=50 * _MIB,
    private_predicted_bytes=200 * _MIB,
)


def test_a_plan_gets_twice_its_training_and_32_mib_if_the_budget_has_them() -> None:
    """250 + 2 x 50 + 32 = 382 MiB: of both predictions; a byte less, and the plan stays as it is."""
    spared = with_spare(_PLAN, 382 * _MIB)
    assert spared == replace(
        _PLAN, predicted_bytes=382 * _MIB, private_predicted_bytes=332 * _MIB, spare_bytes=132 * _MIB
    )
    assert with_spare(_PLAN, 382 * _MIB - 1) == _PLAN
    assert with_spare(replace(_PLAN, private_predicted_bytes=0), 382 * _MIB).private_predicted_bytes == 0


def test_a_plan_that_comes_back_with_spare_memory_gets_it_once() -> None:
    """The coordinator offers a device the plan of its last round."""
    spared = with_spare(_PLAN, 400 * _MIB)
    assert with_spare(spared, 400 * _MIB) == spared
    assert with_spare(spared, 300 * _MIB) == without_spare(spared) == _PLAN


@pytest.mark.skipif(sys.platform != "linux", reason="malloc's thresholds are glibc's")
def test_training_has_the_same_bits_and_stays_below_its_prediction_with_spare_memory_and_without(
    tmp_path: Path,
) -> None:
    """Batches of 32 images. 1 GB has room for spare memory; 8 MiB more than the plan needs is less than any spare."""

    def trained(budget_bytes: int) -> tuple[Report, dict[str, Tensor]]:
        work = make_work(
            tmp_path / str(budget_bytes), run=image_run(32), device_file=npz_images(tmp_path), budget_bytes=budget_bytes
        )
        assert run_worker(work) == 0, (work / "stderr").read_text()
        return read_update(work)

    roomy, tensors = trained(10**9)
    assert roomy.plan is not None
    assert roomy.plan.spare_bytes > 0
    tight_bytes = without_spare(roomy.plan).private_predicted_bytes + 8 * _MIB
    lean, others = trained(tight_bytes)
    assert lean.plan is not None
    assert _ways_to_train(without_spare(roomy.plan)) == _ways_to_train(lean.plan)
    assert all(tensors[name].equal(others[name]) for name in tensors)
    for report, plan in ((roomy, roomy.plan), (lean, lean.plan)):
        assert report.private_base_bytes <= report.private_peak_bytes <= plan.private_predicted_bytes


def _ways_to_train(plan: TrainingPlan) -> TrainingPlan:
    """The plan without budgets and predictions, which each rehearsal measures anew."""
    return replace(plan, budget_bytes=0, predicted_bytes=0, private_budget_bytes=0, private_predicted_bytes=0)
