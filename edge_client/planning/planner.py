"""What a device trains inside its budget: the first candidate whose predicted peak fits.

Covers: the full model with the largest microbatch that fits, because fewer, larger pieces take less time.
Does not cover: smaller models and training by groups of units; a device that cannot hold one sample declines.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_client import faults
from edge_client.errors import InputError, NothingFitsError
from edge_client.files import format_bytes
from edge_client.models.contract import Model
from edge_client.planning.cost import WORKER_BASE_BYTES, Workload, predict, predict_fixed
from edge_client.records import TrainingPlan

__all__ = ["check_fixed", "microbatches", "plan"]


def microbatches(batch: int) -> list[int]:
    """The candidates: the whole batch, its half, ... one sample."""
    if batch < 1:
        raise ValueError(f"expected a batch of at least one sample, got {batch}")
    sizes = [batch]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def plan(model: Model, workload: Workload, *, budget_bytes: int, ceiling_bytes: int | None = None) -> TrainingPlan:
    """The plan for a budget; raises `NothingFitsError` with the smallest budget that would do.

    `ceiling_bytes`: a plan whose training was predicted to take so much went over the budget here: take a smaller one.
    """
    predicted, least = 0, model.min_batch
    if workload.batch < least:
        raise InputError(f"train.batch: this model trains on at least {least} samples at a time, got {workload.batch}")
    for microbatch in (size for size in microbatches(workload.batch) if size >= least):
        training = predict(model, workload, microbatch=microbatch) - WORKER_BASE_BYTES
        training = int(training * faults.scale("planning.predicted"))
        predicted = WORKER_BASE_BYTES + training
        if predicted <= budget_bytes and (ceiling_bytes is None or training < ceiling_bytes):
            return TrainingPlan(
                microbatch=microbatch,
                budget_bytes=budget_bytes,
                predicted_bytes=predicted,
                training_bytes=training,
            )
    what = "one sample" if least == 1 else f"{least} samples"
    if ceiling_bytes is not None and predicted <= budget_bytes:
        raise NothingFitsError(f"{what} at a time went over the budget of {format_bytes(budget_bytes)} here")
    raise _nothing_fits(f"{what} at a time needs", predicted, budget_bytes)


def check_fixed(sizes: Sequence[int], workload: Workload, *, budget_bytes: int) -> None:
    """Raise `NothingFitsError` if a model with such parameters fits no budget of this size: before it is built."""
    predicted = predict_fixed(sizes, workload)
    if predicted > budget_bytes:
        raise _nothing_fits("its parameters alone need", predicted, budget_bytes)


def _nothing_fits(what: str, predicted: int, budget_bytes: int) -> NothingFitsError:
    return NothingFitsError(
        f"{what} {format_bytes(predicted)}, the budget is {format_bytes(budget_bytes)}; "
        f"set limits.memory to at least {predicted} bytes, or take a smaller model"
    )
