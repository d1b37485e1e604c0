"""The plan that a worker trains by, from its start to its end: a smaller one when the daemon allows less memory.

Whatever becomes of the process, the daemon knows which plan it tried: it is written down before it comes into force.
Covers: the limit that follows from the plan, replanning between batches. Does not cover: which plan (`plan`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from torch import nn

from edge_client import durable
from edge_client.config.quantities import format_bytes
from edge_client.device import guard
from edge_client.errors import NothingFitsError
from edge_client.measuring.rehearsed import Rehearsed
from edge_client.models.contract import Model
from edge_client.records import TrainingPlan
from edge_client.worker import live_files
from edge_client.worker.accelerator_memory import AcceleratorMemory
from edge_client.worker.accelerator_plan import AcceleratorPlanner
from edge_client.worker.allowance import LIMIT_SLACK_BYTES, Allowance
from edge_client.worker.plan import Planner
from edge_client.worker.spare_memory import without_spare

__all__ = ["PlanInForce"]

_log = logging.getLogger(__name__)

_PIECES_BYTES = 2 * 2**20  # of kept memory that cannot be given back; up to 1 MB was measured
_KERNEL_BYTES = 3 * 2**20  # of a convolution: 0.25 MB for each of forward, two backwards, and about four batch sizes
# what the loop changes from batch to batch; other changes of a plan wait until the method has done its phase
_AT_ONCE = (
    *("microbatch", "buffered", "budget_bytes", "predicted_bytes", "training_bytes"),
    *("private_predicted_bytes", "spare_bytes", "accelerator_budget_bytes", "accelerator_predicted_bytes"),
)


class PlanInForce:
    """A plan, and the allowance that follows it."""

    def __init__(
        self,
        plan: TrainingPlan,
        *,
        planner: Planner | AcceleratorPlanner,
        allowance: Allowance,
        model: Model,
        memory_key: str,
        workdir: Path,
        num_replans: int = 0,
        memory: AcceleratorMemory | None = None,
        rehearsed: Rehearsed | None = None,
    ) -> None:
        """`rehearsed` is what the plan took when it was tried before."""
        self.plan = plan
        self.num_replans = num_replans
        self._memory = memory
        self._planner, self._allowance, self._model = planner, allowance, model
        self._memory_key, self._workdir = memory_key, workdir
        self._rehearsed = rehearsed

    def begin(self) -> None:
        """What the process uses from now on is due to the plan."""
        self._write_trial()
        self._model.recompute = self.plan.recompute
        self._allowance.begin()
        self._allowance.limit(self._slack_bytes(self._rehearsed))
        self._limit_accelerator()
        if self.plan.spare_bytes:
            guard.keep_freed_memory()

    def replan(self) -> TrainingPlan | None:
        """Called before every batch: a smaller plan, if there is less memory than before and this one does not fit.

        If no plan fits, the worker goes on as it is.
        """
        host_bytes = self._allowance.look()
        accelerator_bytes = self._memory.look() if self._memory is not None else None
        if host_bytes is None and accelerator_bytes is None:
            return None
        budget_bytes = host_bytes if host_bytes is not None else self._allowance.budget_bytes
        if self._memory is not None and accelerator_bytes is not None:
            self._memory.budget_bytes = accelerator_bytes
        if self.plan.spare_bytes and self.plan.predicted_bytes > budget_bytes:
            self._give_spare_back()
        before = self.plan
        if self._planner.fits(before, budget_bytes):
            self.adopt(replace(before, budget_bytes=budget_bytes))
            return None
        left = format_bytes(accelerator_bytes if accelerator_bytes is not None else budget_bytes)
        left += " of the accelerator" if accelerator_bytes is not None else ""
        try:
            smaller = self._planner.smaller_plan(before, budget_bytes)
        except NothingFitsError as error:
            _log.warning("only %s are left, and no smaller plan fits: %s", left, error)
            return None
        self.num_replans += 1
        _log.info("only %s are left: %s, from now on %s", left, before.describe(), smaller.describe())
        if replace(before, **{name: getattr(smaller, name) for name in _AT_ONCE}) == smaller:
            self.adopt(smaller)
        return smaller

    def _give_spare_back(self) -> None:
        guard.return_freed_memory()
        assert isinstance(self._planner, Planner)  # on an accelerator no plan has spare memory
        self._planner = replace(self._planner, base_bytes=self._planner.base_bytes + _PIECES_BYTES)
        lean = without_spare(self.plan)
        self.plan = replace(lean, predicted_bytes=lean.predicted_bytes + _PIECES_BYTES)

    def adopt(self, plan: TrainingPlan) -> None:
        """Train by `plan` from now on: it answers for what the process uses, and its budget is the limit."""
        if plan == self.plan:
            return
        self.plan = plan
        self._model.recompute = plan.recompute
        self._allowance.shrink(plan.budget_bytes, self._slack_bytes())
        self._limit_accelerator()
        self._write_trial()

    def _limit_accelerator(self) -> None:
        if self._memory is not None and isinstance(self._planner, AcceleratorPlanner):
            self._memory.begin(self._planner.limit_bytes(self.plan))

    def _write_trial(self) -> None:
        trial = live_files.Trial(
            key=self._memory_key,
            budget_bytes=self._allowance.budget_bytes,
            plan=self.plan,
            accelerator_budget_bytes=self.plan.accelerator_budget_bytes,
        )
        with durable.disk_errors(f"cannot write into {self._workdir}"):
            live_files.write_trial(self._workdir, trial)

    def _slack_bytes(self, rehearsed: Rehearsed | None = None) -> int:
        """What may be reserved and is hardly used, such as code made for each convolution and size of batch."""
        num_convs = sum(isinstance(module, nn.modules.conv._ConvNd) for module in self._model.modules())
        slack_bytes = LIMIT_SLACK_BYTES + num_convs * _KERNEL_BYTES
        if rehearsed is None:
            return slack_bytes
        room = self._allowance.budget_bytes - self._allowance.used_bytes()
        return max(slack_bytes, rehearsed.limit_bytes - max(0, room))
