"""A plan in the middle of a training: only its microbatch can become smaller, the largest that fits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from edge_client.models.contract import Model, from_sequential
from edge_client.planning.cost import Shape, Workload, training_bytes
from edge_client.planning.planner import Request, shrink
from edge_client.planning.rows import ModelRows
from edge_client.planning.shapes import rows_from_shapes
from edge_client.records import PlanRules, TrainingPlan

BASE = 1000
WORKLOAD = Workload(batch=64)
PLAN = TrainingPlan(microbatch=64, budget_bytes=10**9, predicted_bytes=10**9, training_bytes=10**9 - BASE)


def _rows(*layers: nn.Module, input_shape: tuple[int, ...] = (1000,)) -> ModelRows:
    torch.manual_seed(0)
    model: Model = from_sequential(nn.Sequential(*layers), input_shape=input_shape)
    return rows_from_shapes(model, channels_last=False)


def _convolutions() -> ModelRows:
    """Many activations, few parameters: every sample counts."""
    head = nn.Sequential(nn.Flatten(), nn.Linear(4096, 2))
    return _rows(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), head, input_shape=(1, 32, 32))


def _request(rows: ModelRows, room: int, ceiling: int | None = None) -> Request:
    variants = {"full": rows}
    rules = PlanRules()
    return Request(
        variants=variants, workload=WORKLOAD, rules=rules, base_bytes=BASE, training_bytes=room, ceiling_bytes=ceiling
    )


def test_the_largest_smaller_microbatch_that_fits_is_taken_to_the_byte() -> None:
    """The room is what 8 samples need: 8; one byte less, or the same as a ceiling: 4; then nothing else has changed."""
    rows = _convolutions()
    needed = {size: training_bytes(rows, WORKLOAD, Shape(microbatch=size)) for size in (8, 4, 1)}
    found = shrink(_request(rows, needed[8]), PLAN)
    expected = {"budget_bytes": BASE + needed[8], "predicted_bytes": BASE + needed[8], "training_bytes": needed[8]}
    assert found == replace(PLAN, microbatch=8, **expected)
    for request in (_request(rows, needed[8] - 1), _request(rows, 10**9, needed[8])):
        smaller = shrink(request, PLAN)
        assert smaller is not None
        assert (smaller.microbatch, smaller.training_bytes) == (4, needed[4])
    assert shrink(_request(rows, needed[1] - 1), PLAN) is None


def test_it_is_smaller_even_if_the_plan_itself_would_fit() -> None:
    """Whoever asks knows that it does not; a plan of one sample has nothing below it."""
    rows = _convolutions()
    half = shrink(_request(rows, 10**9), PLAN)
    assert half is not None
    assert half.microbatch == 32
    assert shrink(_request(rows, 10**9), replace(PLAN, microbatch=1)) is None


def test_no_microbatch_is_smaller_than_the_model_can_train_on() -> None:
    """BatchNorm over one value per channel needs two samples: 2 is there, 1 is not."""
    rows = _rows(nn.Linear(1000, 500), nn.BatchNorm1d(500), nn.Linear(500, 10))
    assert rows.min_batch == 2
    two = training_bytes(rows, WORKLOAD, Shape(microbatch=2))
    found = shrink(_request(rows, two), PLAN)
    assert found is not None
    assert found.microbatch == 2
    assert shrink(_request(rows, two - 1), PLAN) is None
