"""The planner: the largest microbatch whose predicted peak fits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edge_client.errors import InputError, NothingFitsError
from edge_client.models.contract import Model, from_sequential
from edge_client.planning.cost import WORKER_BASE_BYTES, Workload, predict
from edge_client.planning.planner import check_fixed, microbatches, plan


def _model() -> Model:
    """Linear 1000 -> 500: 500,500 parameters, 500,000 in the largest; per sample 1,000 in, 500 out."""
    torch.manual_seed(0)
    return from_sequential(nn.Sequential(nn.Linear(1000, 500)), input_shape=(1000,))


def test_the_prediction_by_hand() -> None:
    """SGD: 3 copies of 500,500 + 2 of 500,000 + 16 samples of 1,500 twice, 4 bytes each; 4 MiB; 7 held."""
    expected = WORKER_BASE_BYTES + 4 * (3 * 500_500 + 2 * 500_000 + 2 * 16 * 1_500) + 4 * 2**20 + 7
    assert predict(_model(), Workload(batch=64, held_bytes=7), microbatch=16) == expected


def test_momentum_costs_one_copy_and_adam_two() -> None:
    """A copy is 4 * 500,500 bytes."""
    workloads = [Workload(batch=1), Workload(batch=1, momentum=0.9), Workload(batch=1, optimizer="adam")]
    plain, momentum, adam = (predict(_model(), workload, microbatch=1) for workload in workloads)
    assert (momentum - plain, adam - plain) == (2_002_000, 4_004_000)


def test_candidates_are_halves_down_to_one() -> None:
    """Odd sizes are cut down."""
    assert microbatches(48) == [48, 24, 12, 6, 3, 1]
    assert microbatches(1) == [1]
    with pytest.raises(ValueError, match="got 0"):
        microbatches(0)


@pytest.mark.parametrize("microbatch", [64, 32, 8, 1])
def test_the_largest_microbatch_that_fits_wins_to_the_byte(microbatch: int) -> None:
    """The budget is the candidate's own prediction; with one byte less the next smaller is taken, or nothing fits."""
    workload = Workload(batch=64)
    budget = predict(_model(), workload, microbatch=microbatch)
    chosen = plan(_model(), workload, budget_bytes=budget)
    assert (chosen.microbatch, chosen.predicted_bytes, chosen.budget_bytes) == (microbatch, budget, budget)
    assert chosen.slice == "full"
    if microbatch > 1:
        assert plan(_model(), workload, budget_bytes=budget - 1).microbatch == microbatch // 2
    else:
        with pytest.raises(NothingFitsError, match=f"at least {budget} bytes"):
            plan(_model(), workload, budget_bytes=budget - 1)


def test_a_plan_is_smaller_than_what_went_over_the_budget_before() -> None:
    """What 32 samples were to take is too much: 16; what one was to take: nothing is left, whatever the budget."""
    workload = Workload(batch=64)
    whole, half, one = (
        predict(_model(), workload, microbatch=size) - WORKER_BASE_BYTES for size in (64, 32, 1)
    )
    assert plan(_model(), workload, budget_bytes=10**12).training_bytes == whole
    assert plan(_model(), workload, budget_bytes=10**12, ceiling_bytes=whole + 1).microbatch == 64
    smaller = plan(_model(), workload, budget_bytes=10**12, ceiling_bytes=half)
    assert (smaller.microbatch, smaller.training_bytes < half) == (16, True)
    with pytest.raises(NothingFitsError, match="one sample at a time went over the budget"):
        plan(_model(), workload, budget_bytes=10**12, ceiling_bytes=one)


def test_a_budget_of_nothing_fits_nothing() -> None:
    """A device without free memory measures 0: that is no permission to take all."""
    with pytest.raises(NothingFitsError, match="the budget is 0"):
        plan(_model(), Workload(batch=1), budget_bytes=0)


def test_parameters_alone_decide_before_a_model_is_built() -> None:
    """SGD: 3 copies of 500,500 and 2 of 500,000 elements of 4 bytes, 4 MiB, to the byte."""
    needed = WORKER_BASE_BYTES + 4 * (3 * 500_500 + 2 * 500_000) + 4 * 2**20
    check_fixed([500_000, 500], Workload(batch=64), budget_bytes=needed)
    with pytest.raises(NothingFitsError, match=f"parameters alone .* at least {needed} bytes"):
        check_fixed([500_000, 500], Workload(batch=64), budget_bytes=needed - 1)


def test_no_microbatch_is_smaller_than_the_model_can_train_on() -> None:
    """A BatchNorm of one value per channel needs two samples: 8, 4, 2, and no 1; a batch of 1 is refused."""
    model = from_sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), input_shape=(4,))
    smallest = predict(model, Workload(batch=8), microbatch=2)
    assert plan(model, Workload(batch=8), budget_bytes=smallest).microbatch == 2
    with pytest.raises(NothingFitsError, match="2 samples at a time needs"):
        plan(model, Workload(batch=8), budget_bytes=smallest - 1)
    with pytest.raises(InputError, match="at least 2 samples at a time, got 1"):
        plan(model, Workload(batch=1), budget_bytes=10**12)
