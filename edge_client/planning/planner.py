"""What a device trains inside its budget: one search over all ways to train, in the order that the method prefers.

    all at once | groups of blocks   as few groups as fit, put together from left to right
    partial training                 first blocks that do not fit stay untrained
    microbatch                       the batch, its half, its quarter, ...
    recompute                        activations made again in backward
    dtype                            kept in half the bytes, where the run allows it and the processor has bf16
    several models                   that teach each other, where memory is left over

Each candidate has a predicted peak (`cost`), an upper bound; the first that fits wins. BatchNorm sees a microbatch
instead of the batch, so a model that has one keeps the batch whole as long as recomputing or groups do it; without one,
microbatches change nothing and the candidate that should be the fastest comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from edge_client.config.quantities import format_bytes
from edge_client.errors import InputError, NothingFitsError
from edge_client.planning.cost import Shape, Workload, epoch_seconds, relative_time, training_bytes
from edge_client.planning.rows import ModelRows, peak
from edge_client.records import PlanRules, TrainingPlan

__all__ = ["Candidate", "Choice", "Request", "choose", "microbatches", "shrink", "whole_batch_bytes"]

_Names = tuple[str, ...]
_Fits = Callable[[_Names, Sequence[_Names]], bool]  # a group, and those before it

_NUM_ALTERNATIVES = 3
_FREE_MODES = ("plain", "fused")
_MODE_TIMES = {"plain": 1.0, "fused": 1.05, "units": 1.33}  # a second forward pass is a third of a step
_LEAST_STATISTICS = 8  # samples whose statistics a BatchNorm can live with: partial training is better than fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to plan for."""

    variants: Mapping[str, ModelRows]  # slice -> its rows, the largest first; "full" is the whole model
    halves: Mapping[str, ModelRows] = field(default_factory=dict)  # the same in bf16, where the processor has it
    workload: Workload
    rules: PlanRules
    base_bytes: int  # of the worker, warmed up
    training_bytes: int  # that training may add to it
    of_training: bool = False  # whether that is the budget which a person typed, not one of the whole worker
    ceiling_bytes: int | None = None  # a plan with so many went over the budget: only less will do
    num_samples: int = 0  # for the file of buffered activations
    disk_bytes: int = 0  # that such a file may take; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train."""

    slice: str
    shape: Shape
    dtype: str = "fp32"
    training_bytes: int
    relative_time: float  # against the whole model at once, with the whole batch
    # seconds per sample and epoch where the rows were measured, estimated from single steps; 0: nobody measured
    sample_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan, and what else would have fitted or nearly did."""

    plan: TrainingPlan
    chosen: Candidate
    alternatives: tuple[Candidate, ...]  # the next ones, best first
    reason: str


def microbatches(batch: int) -> list[int]:
    """The whole batch, its half, ... one sample."""
    if batch < 1:
        raise InputError(f"batch: expected at least one sample, got {batch}")
    sizes = [batch]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def whole_batch_bytes(rows: ModelRows, workload: Workload) -> int:
    """What training everything at once on whole batches adds to a worker, by means that cost no time.

    A device of a run with several slices trains the first for which this fits. Smaller microbatches would let nearly
    every device train the whole model slowly, on statistics of a few samples.
    """
    free = _FREE_MODES if workload.recomputes else ("plain",)
    shapes = [Shape(microbatch=workload.batch, recompute=_kind(mode)) for mode in free if mode in rows.modes]
    return min(training_bytes(rows, workload, shape) for shape in shapes)


def choose(request: Request) -> Choice:
    """The first candidate that fits; raises `NothingFitsError` with the smallest budget that would do."""
    if request.rules.cost == "table-1" and request.ceiling_bytes is None:
        return _choose_by_table(request)
    limit = _limit(request)
    fitting = _first_fitting(_candidates(request, limit), limit, 1 + _NUM_ALTERNATIVES)
    if not fitting:
        raise _nothing_fits(request)
    chosen = fitting[0]
    return Choice(
        plan=_plan(request, chosen),
        chosen=chosen,
        alternatives=tuple(fitting[1:]),
        reason=_reason(request, chosen),
    )


def shrink(request: Request, plan: TrainingPlan) -> TrainingPlan | None:
    """The same plan with smaller microbatches, which a training can take in its middle; None if none of them fits."""
    rows = (request.variants if plan.dtype == "fp32" else request.halves)[plan.slice]
    for size in microbatches(plan.microbatch)[1:]:
        shape = replace(Shape.of(plan), microbatch=size)
        needed = training_bytes(rows, request.workload, shape)
        if size >= rows.min_batch and needed <= _limit(request):
            return replace(
                plan,
                microbatch=size,
                budget_bytes=request.base_bytes + request.training_bytes,
                predicted_bytes=request.base_bytes + needed,
                training_bytes=needed,
            )
    return None


def _limit(request: Request) -> int:
    if request.ceiling_bytes is None:
        return request.training_bytes
    return min(request.training_bytes, request.ceiling_bytes - 1)


def _choose_by_table(request: Request) -> Choice:
    """Groups as FeDepth's authors make them: by their own rule, with the whole batch, 5 % over the budget allowed."""
    from edge_client.planning.paper_cost import decompose  # torch

    rows, batch = request.variants["full"], request.workload.batch
    costs = {unit.name: peak((unit.paper,), batch) for unit in rows.modes["plain"] if unit.kind == "block"}
    decomposition = decompose(costs, request.training_bytes, partial=request.rules.partial)
    is_whole = len(decomposition.groups) == 1 and not decomposition.skipped
    shape = Shape(microbatch=batch, groups=() if is_whole else decomposition.groups, skipped=decomposition.skipped)
    most = max(sum(costs[name] for name in group) for group in decomposition.groups)
    chosen = replace(_candidate(request, "full", shape), training_bytes=int(most))
    reason = f"FeDepth's Table 1 charges {format_bytes(int(most))} for the largest group; the truth is another"
    return Choice(plan=_plan(request, chosen), chosen=chosen, alternatives=(), reason=reason)


def _first_fitting(candidates: Iterator[Candidate], limit: int, count: int) -> list[Candidate]:
    """The first candidates that fit, at most `count`, each once."""
    fitting: list[Candidate] = []
    for candidate in candidates:
        if candidate.training_bytes <= limit and candidate not in fitting:
            fitting.append(candidate)
            if len(fitting) == count:
                break
    return fitting


def _candidates(request: Request, limit: int) -> Iterator[Candidate]:
    """All ways, in the order of preference; groups are made for this limit."""
    first = next(iter(request.variants.values()))
    sizes = [size for size in microbatches(request.workload.batch) if size >= first.min_batch]
    if not sizes:
        raise InputError(
            f"batch: this model trains on at least {first.min_batch} samples at a time, got {request.workload.batch}"
        )
    if request.rules.max_models > 1:
        for num_models in range(request.rules.max_models, 1, -1):
            shape = Shape(microbatch=request.workload.batch, num_models=num_models)
            yield _candidate(request, "full", shape)
    exact = not first.has_batchnorm  # microbatches change nothing but rounding
    if exact and not request.rules.groups and len(request.variants) == 1:
        yield from sorted(_ways(request, sizes, limit), key=partial(_expected_time, request.workload.batch))
        return
    large = [size for size in sizes if exact or size >= _LEAST_STATISTICS]
    yield from _ways(request, large, limit)
    if request.rules.groups and request.rules.partial:
        for size in large:
            yield from _grouped(request, size, limit, partial=True)
    yield from _ways(request, [size for size in sizes if size not in large], limit)
    if request.rules.groups and request.rules.partial:
        for size in sizes:
            yield from _grouped(request, size, limit, partial=True)


def _expected_time(batch: int, candidate: Candidate) -> tuple[bool, float]:
    """Against all at once, by rule: the measured times differ a little each time, and a plan must not."""
    mode = _MODE_TIMES[candidate.shape.recompute or "plain"]
    return candidate.dtype != "fp32", mode + 0.05 * math.log2(batch / candidate.shape.microbatch)


def _ways(request: Request, sizes: Sequence[int], limit: int) -> Iterator[Candidate]:
    """Everything trained: larger microbatches first; for one size, larger slices first."""
    for size in sizes:
        for name, rows in request.variants.items():
            yield from _whole(request, name, rows, size, ("plain", "fused"))
            if request.rules.groups:
                yield from _grouped(request, size, limit, partial=False)
            yield from _whole(request, name, rows, size, ("units",))
            if name in request.halves:
                yield _candidate(request, name, Shape(microbatch=size), half=True)


def _whole(request: Request, name: str, rows: ModelRows, size: int, modes: Sequence[str]) -> Iterator[Candidate]:
    for mode in modes:
        if mode in rows.modes and (mode == "plain" or request.workload.recomputes):
            yield _candidate(request, name, Shape(microbatch=size, recompute=_kind(mode)))


def _kind(mode: str) -> str | None:
    return None if mode == "plain" else mode


def _grouped(request: Request, size: int, limit: int, *, partial: bool) -> Iterator[Candidate]:
    """The full model in groups, with each kind of recomputation."""
    rows = request.variants["full"]
    for mode, units in rows.modes.items():
        blocks = [unit.name for unit in units if unit.kind == "block"]
        shape = Shape(microbatch=size, recompute=_kind(mode))
        grouped = _decompose(request, rows, shape, blocks, limit, partial=partial)
        if grouped is not None and (grouped.groups, grouped.skipped) != ((tuple(blocks),), ()):
            yield _candidate(request, "full", grouped)


def _decompose(
    request: Request, rows: ModelRows, shape: Shape, blocks: Sequence[str], limit: int, *, partial: bool
) -> Shape | None:
    """Groups from left to right, each as long as it fits; None if some block does not fit by itself.

    Blocks that are trained together leave a little less room for all later ones: if that was too much, one by one.
    """

    def fits(group: tuple[str, ...], earlier: Sequence[tuple[str, ...]]) -> bool:
        together = [other for other in earlier if len(other) > 1][:1]  # all others do not change what this one takes
        with_group = replace(shape, groups=(*together, group))
        return training_bytes(rows, request.workload, with_group) <= limit

    for max_size in (len(blocks), 1):
        skipped, groups = _greedy(blocks, fits, max_size, partial=partial)
        if groups and bool(skipped) == partial:
            return _buffered(request, rows, replace(shape, groups=groups, skipped=skipped), limit)
    return None


def _greedy(blocks: Sequence[str], fits: _Fits, max_size: int, *, partial: bool) -> tuple[_Names, tuple[_Names, ...]]:
    """The blocks that are skipped, and groups of at most `max_size`; no groups if some block does not fit."""
    skipped: _Names = ()
    groups: list[_Names] = []
    for name in blocks:
        if groups and len(groups[-1]) < max_size and fits((*groups[-1], name), groups[:-1]):
            groups[-1] = (*groups[-1], name)
        elif fits((name,), groups):
            groups.append((name,))
        elif partial and not groups:
            skipped = (*skipped, name)
        else:
            return (), ()
    return skipped, tuple(groups)


def _buffered(request: Request, rows: ModelRows, shape: Shape, limit: int) -> Shape:
    """The same shape with the outputs of frozen units on disk, if they have room there."""
    outputs = {unit.name: unit.out_bytes for unit in rows.modes["plain"]}
    order = list(outputs)
    starts = [order.index(group[0]) - 1 for group in shape.groups]
    sizes = [outputs[order[start]] if start > 0 else 0 for start in starts]
    # the file of the group before is read while the next one is written
    file_bytes = max((one + other for one, other in pairwise([0, *sizes])), default=0) * request.num_samples
    if not 0 < file_bytes <= request.disk_bytes:
        return shape
    buffered = replace(shape, buffered=True)
    return buffered if training_bytes(rows, request.workload, buffered) <= limit else shape


def _candidate(request: Request, name: str, shape: Shape, *, half: bool = False) -> Candidate:
    rows = request.halves[name] if half else request.variants[name]
    whole = request.variants.get("full", rows)
    share = _seconds(rows) / _seconds(whole) if whole is not rows else 1.0
    return Candidate(
        slice=name,
        shape=shape,
        dtype=rows.dtype,
        training_bytes=training_bytes(rows, request.workload, shape),
        relative_time=round(relative_time(rows, request.workload, shape) * share, 3),
        sample_s=epoch_seconds(rows, request.workload, shape, 1) if rows.torch else 0.0,
    )


def _seconds(rows: ModelRows) -> float:
    """Time of a step per sample."""
    return sum(unit.forward_s[0] + unit.backward_s[0] for unit in rows.modes["plain"]) or 1.0


def _plan(request: Request, chosen: Candidate) -> TrainingPlan:
    shape = chosen.shape
    rows = (request.variants if chosen.dtype == "fp32" else request.halves)[chosen.slice]
    return TrainingPlan(
        slice=chosen.slice,
        groups=shape.groups,
        skipped=shape.skipped,
        microbatch=shape.microbatch,
        recompute=shape.recompute,
        channels_last=rows.channels_last,
        dtype=rows.dtype,
        buffered=shape.buffered,
        num_models=shape.num_models,
        budget_bytes=request.base_bytes + request.training_bytes,
        predicted_bytes=request.base_bytes + chosen.training_bytes,
        training_bytes=chosen.training_bytes,
    )


def _reason(request: Request, chosen: Candidate) -> str:
    room = format_bytes(request.training_bytes)
    full = _candidate(request, next(iter(request.variants)), Shape(microbatch=request.workload.batch))
    if chosen.shape == full.shape and chosen.slice == full.slice:
        return f"training everything at once needs {format_bytes(chosen.training_bytes)} of {room}"
    return (
        f"training everything at once would need {format_bytes(full.training_bytes)}, there are {room}; this needs "
        f"{format_bytes(chosen.training_bytes)} and about {chosen.relative_time:.2g} times the time"
    )


def _nothing_fits(request: Request) -> NothingFitsError:
    """The error, with the smallest budget that would do: groups are made for a limit, so that one is searched for."""
    least = _least(request)
    budget = request.base_bytes + request.training_bytes
    ceiling = f", and a plan of {format_bytes(request.ceiling_bytes)} went over it" if request.ceiling_bytes else ""
    if request.of_training:
        return NothingFitsError(
            f"nothing fits: the smallest plan takes {format_bytes(least)} of training memory, the budget is "
            f"{format_bytes(max(0, request.training_bytes))}{ceiling}; a training budget of {_typed(least)} would do, "
            "or a smaller model",
            least_bytes=request.base_bytes + least,
        )
    return NothingFitsError(
        f"nothing fits: the smallest plan adds {format_bytes(least)} to the {format_bytes(request.base_bytes)} of a "
        f"worker, the budget is {format_bytes(max(0, budget))}{ceiling}; a budget of "
        f"{request.base_bytes + least} bytes would do, or a smaller model",
        least_bytes=request.base_bytes + least,
    )


def _typed(num_bytes: int) -> str:
    """A size as people type it, rounded up: `5.5MB`."""
    unit, name = (10**5, "MB") if num_bytes >= 10**6 else (10**2, "KB")
    return f"{-(-num_bytes // unit) / 10:g}{name}"


def _least(request: Request) -> int:
    """The smallest limit under which some candidate fits."""
    smallest = min(c.training_bytes for c in _candidates(request, limit=2**62))
    if not request.rules.groups:
        return smallest
    low, high = 0, smallest
    while low < high - 1024:
        middle = (low + high) // 2
        if _first_fitting(_candidates(request, middle), middle, 1):
            high = middle
        else:
            low = middle + 1
    return min(c.training_bytes for c in _first_fitting(_candidates(request, high), high, 64))
