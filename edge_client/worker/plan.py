"""The plans of one worker: from cost rows, its base memory, and what went over the budget on this device before.

Covers: which rows there are, the first plan, a new plan for less memory. Does not cover: the search (`planning`), the
plan in force while the worker trains (`plan_in_force`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

from edge_client.config.run_file import RunFile
from edge_client.device.accelerator import CPU, Accelerator
from edge_client.device.private_memory import process_memory
from edge_client.measuring.calibration import job_for
from edge_client.measuring.plan_search import PlanSearch
from edge_client.measuring.row_sources import find_rows, sent_rows
from edge_client.planning.cost import Shape, training_bytes
from edge_client.planning.rows import ModelRows
from edge_client.records import TrainingPlan, to_map
from edge_client.worker.order_files import Assignment, read_json
from edge_client.worker.process_cache import ProcessCache
from edge_client.worker.run_setup import RunSetup
from edge_client.worker.spare_memory import without_spare

__all__ = ["CostRows", "Planner", "cost_rows", "half_type", "knowledge_bytes", "lowest_ceiling", "memory_key"]

_MIN_KNOWLEDGE_BYTES = 2**20  # less is hidden in what processes differ by
_WIDENING = {"fp32": 1, "int8": 4}  # from the codec to float32; two for all others


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRows:
    """What the units of the model cost in each type of activations; None where only shapes are left."""

    fp32: ModelRows | None
    half: ModelRows | None  # in bf16 or fp16


def cost_rows(
    assignment: Assignment,
    setup: RunSetup,
    input_shape: tuple[int, ...],
    *,
    budget_bytes: int,
    cache: ProcessCache,
    device: Accelerator = CPU,
) -> CostRows:
    """The best rows there are; in half the bytes as well, where the run allows it and the device has such a type.

    Raises `CalibrationNeededError` the first time, if the owner allows measuring and there is memory for it.
    """

    def rows(dtype: str) -> ModelRows | None:
        return _rows(assignment, setup, input_shape, dtype, budget_bytes=budget_bytes, cache=cache)

    half = half_type(device) if assignment.run.train.dtype == "auto" else None
    if half == "fp16" and setup.method.plans.again:  # a pass of the method's own would see scaled gradients
        half = None
    # rows in fp16 are those in bf16: its numbers are as long
    measured = rows("bf16") if half is not None else None
    return CostRows(
        fp32=rows("fp32"), half=replace(measured, dtype=half) if measured is not None and half is not None else None
    )


def half_type(device: Accelerator) -> str | None:
    """The type of two bytes that is worth it there; None: there is none."""
    return next((dtype for dtype in ("bf16", "fp16") if dtype in device.dtypes()), None)


def _rows(
    assignment: Assignment,
    setup: RunSetup,
    input_shape: tuple[int, ...],
    dtype: str,
    *,
    budget_bytes: int,
    cache: ProcessCache,
) -> ModelRows | None:
    run, device = assignment.run, assignment.device
    task = device.tasks.get(run.task.name) if run.task is not None else None
    job = job_for(run, setup.method.plans, input_shape, task=task, slice_name=setup.architecture, dtype=dtype)
    attempt = assignment.workdir / "calibration.json"  # of this assignment: a failed one is not repeated
    attempted = attempt.exists() and read_json(attempt).get("key") == job.key
    room = budget_bytes - process_memory().private_bytes
    may_measure = device.limits.calibrate and not attempted
    sent = sent_rows(assignment.settings, setup.architecture) if dtype == "fp32" else None
    return cache.once("rows", job.key, lambda: find_rows(job, sent, may_measure=may_measure, room_bytes=room))


def knowledge_bytes(file_bytes: int, codec: str) -> int:
    """What received knowledge takes in memory as float32; little of it, such as class means, counts as nothing."""
    num_bytes = _WIDENING.get(codec, 2) * file_bytes
    return num_bytes if num_bytes >= _MIN_KNOWLEDGE_BYTES else 0


def memory_key(run: RunFile, architecture: str, accelerator: str = "") -> str:
    """What the memory of training depends on beside the plan; the same in another run of the same model.

    `accelerator`: the fingerprint of the one that it is trained on.
    """
    section = run.section(architecture)
    model = to_map(section) | {"init": ""} if section is not None else None
    task = run.task.sha256 if run.task is not None else None
    workload = (run.train.batch, run.train.optimizer, run.train.momentum, run.train.threads)
    of_accelerator = [accelerator] if accelerator else []
    identity = [model, task, architecture, len(run.classes), to_map(run.method), workload, *of_accelerator]
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def lowest_ceiling(assignment: Assignment, key: str) -> int | None:
    """What a plan must stay below, because as much went over the budget here: in this lease, or in earlier work."""
    ceilings = (assignment.order.ceiling_bytes, assignment.order.ceilings.get(key))
    return min((num_bytes for num_bytes in ceilings if num_bytes is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Chooses plans for one warm worker; everything but the budget stays the same while it works."""

    search: PlanSearch
    base_bytes: int
    ceiling_bytes: int | None
    of_training: bool  # the budget is one of training alone, as a simulation has it

    def first_plan(self, offered: TrainingPlan | None, budget_bytes: int) -> TrainingPlan:
        """The plan of the assignment while it fits: it may have been made for another budget. Else a new one.

        Raises `NothingFitsError` if nothing fits, whatever is offered.
        """
        plan = self.new_plan(budget_bytes)
        if offered is not None and offered.private_budget_bytes:  # as a worker reported it, with pages of files beside
            offered = replace(
                offered,
                budget_bytes=offered.private_budget_bytes,
                predicted_bytes=offered.private_predicted_bytes,
                private_budget_bytes=0,
                private_predicted_bytes=0,
            )
        return without_spare(offered) if offered is not None and self._still_fits(offered, budget_bytes) else plan

    def new_plan(self, budget_bytes: int) -> TrainingPlan:
        """The best plan for a budget; raises `NothingFitsError`."""
        room = max(0, budget_bytes - self.base_bytes)
        return self.search.plan(self.base_bytes, room, self.ceiling_bytes, of_training=self.of_training)

    def plan_below(self, plan: TrainingPlan, num_bytes: int, budget_bytes: int) -> TrainingPlan:
        """The best plan that is predicted to add less than `num_bytes`, and less than this one.

        Raises `NothingFitsError`.
        """
        below = [self.rows_bytes(plan), num_bytes, *([self.ceiling_bytes] if self.ceiling_bytes is not None else [])]
        room = max(0, budget_bytes - self.base_bytes)
        return self.search.plan(self.base_bytes, room, max(1, min(below)), of_training=self.of_training)

    def rows_bytes(self, plan: TrainingPlan) -> int:
        """What a plan adds by the cost rows alone, whatever was measured of it."""
        rows = self.search.rows if plan.dtype == "fp32" or self.search.half is None else self.search.half
        return training_bytes(rows, self.search.workload(), Shape.of(plan))

    def smaller_plan(self, plan: TrainingPlan, budget_bytes: int) -> TrainingPlan:
        """The same plan in smaller pieces, or another way to train; raises `NothingFitsError`."""
        room = max(0, budget_bytes - self.base_bytes)
        smaller = self.search.shrink(plan, self.base_bytes, room, self.ceiling_bytes)
        return smaller or self.new_plan(budget_bytes)

    def fits(self, plan: TrainingPlan, budget_bytes: int) -> bool:
        """Whether a plan is inside of a budget."""
        return plan.predicted_bytes <= budget_bytes

    def _still_fits(self, offered: TrainingPlan, budget_bytes: int) -> bool:
        """Not more than is allowed now, nor than what failed here; not made for much less memory than there is."""
        below = self.ceiling_bytes is None or 0 < offered.training_bytes < self.ceiling_bytes
        same = offered.slice == self.search.slice_name
        fits = offered.predicted_bytes <= budget_bytes and below
        return same and fits and 10 * offered.budget_bytes >= 9 * budget_bytes
