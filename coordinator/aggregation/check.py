"""The aggregator's job `check`: every value of an update whose header the intake has accepted. Imports torch.

An update counts if all its values are finite, its counters could come out of the steps that it reports, its knowledge
keeps to the limits of the run's method, and it moves the model no farther than is usual.
"""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor

from coordinator.aggregation.jobs import CheckedUpdate, CheckJob
from coordinator.aggregation.knowledge import check_values
from edge_client import faults
from edge_client.errors import PayloadError
from edge_client.params import square_sum
from edge_client.records import Report, from_map
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX
from edge_client.wire.tensors import ContainerReader

__all__ = ["check_update"]

_MAX_COUNTER = 2**53


def check_update(job: CheckJob) -> CheckedUpdate:
    """Return the norm of an update's delta; raises `PayloadError` with the first thing that is wrong with it."""
    faults.point("aggregator.check")
    with ContainerReader(Path(job.base)) as base, ContainerReader(Path(job.update)) as update:
        report = from_map(Report, update.header.meta)
        max_growth = report.steps * job.max_passes
        names = update.names(MODEL_PREFIX) + update.names(EXTRA_PREFIX)
        squares = sum(_check_model_tensor(name, update, base, report, max_growth) for name in names)
        if job.knowledge is not None:
            check_values(update, job.knowledge, job.codec)
        for name in update.names("evaluation/"):
            _check_counts(name, update.tensor(name), low=0)
        max_norm = _max_norm(job, base)
    norm = math.sqrt(squares)
    if norm > max_norm:
        raise PayloadError("norm", f"the update moves the model by {norm:.6g}, at most {max_norm:.6g} is accepted")
    return CheckedUpdate(norm=norm)


def _max_norm(job: CheckJob, base: ContainerReader) -> float:
    """The bound of the run; in its first round a multiple of the norm of the sent model, + 1 if that is all zeros."""
    if job.max_norm is not None or job.max_ratio is None:
        return math.inf if job.max_norm is None else job.max_norm
    names = [entry.name for entry in base.header.entries if entry.codec != "i64"]
    return job.max_ratio * (math.sqrt(sum(square_sum(base.tensor(name)) for name in names)) + 1.0)


def _check_model_tensor(
    name: str, update: ContainerReader, base: ContainerReader, report: Report, max_growth: int
) -> float:
    """Return the sum of squares of a tensor's delta; raises if it is not finite, or a counter that grew too much."""
    entry, sent = update.entry(name), base.entry(name)
    if entry.shape != sent.shape or (entry.codec == "i64") != (sent.codec == "i64"):
        raise PayloadError(
            "shape",
            f"{name!r} is {entry.codec} {list(entry.shape)}, assignment sent {sent.codec} {list(sent.shape)}",
        )
    value = update.tensor(name)
    if entry.codec == "i64":
        _check_counts(name, value, low=0 if report.payload == "params" else -_MAX_COUNTER)
        before = base.tensor(name)
        after = value if report.payload == "params" else value + before
        if value.numel() and not (int(after.min()) >= 0 and int((after - before).max()) <= max_growth):
            raise PayloadError("range", f"{name!r} counts what {report.steps} steps cannot make of it")
        return 0.0
    squares = square_sum(value, base.tensor(name) if report.payload == "params" else None)
    if not math.isfinite(squares):
        raise PayloadError("not_finite", f"{name!r} has values that are not finite")
    return squares


def _check_counts(name: str, value: Tensor, *, low: int) -> None:
    if value.is_floating_point():
        raise PayloadError("dtype", f"{name!r} is not an integer tensor")
    if value.numel() and not low <= int(value.min()) <= int(value.max()) <= _MAX_COUNTER:
        raise PayloadError("range", f"{name!r} has values outside of {low} to {_MAX_COUNTER}")
