"""Tries a plan that never ran on this device in a fork of the worker, before the round's work depends on it.

The fork is a copy of the warm worker that costs milliseconds; it trains a few steps with a learning rate of 0
(`measuring.rehearsal`) and ends. What it took corrects the prediction and is kept beside the cost rows; the next worker
with the same plan, model and shapes only reads it. A plan that takes more than there is gives way to the next one.
Covers: what is tried, in what process, and what follows. Does not cover: processes that cannot be forked (they go by
the cost rows alone): on an accelerator, with several threads from the beginning, or shared by many assignments.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from edge_client import durable
from edge_client.config.quantities import format_bytes
from edge_client.device import guard
from edge_client.errors import PayloadError, is_out_of_memory
from edge_client.measuring import rehearsed as memory
from edge_client.measuring.calibration import job_for
from edge_client.measuring.rehearsal import Rehearsal, rehearse
from edge_client.measuring.rehearsed import Rehearsed, Shapes
from edge_client.planning.cost import evaluation_batch
from edge_client.records import TrainingPlan, from_map, to_map
from edge_client.task.run_model import load_weights
from edge_client.training.warmup import warm_up
from edge_client.wire.container import EXTRA_PREFIX
from edge_client.worker.allowance import Allowance
from edge_client.worker.local_training import begin_client
from edge_client.worker.model_building import seed_generators
from edge_client.worker.order_files import knowledge_paths, model_path
from edge_client.worker.plan import Planner
from edge_client.worker.stored_tensors import StoredTensors

if TYPE_CHECKING:
    from edge_client.worker.loading import Loaded
    from edge_client.worker.order_files import Assignment
    from edge_client.worker.plan_in_force import PlanInForce
    from edge_client.worker.progress import Progress

__all__ = ["Rehearsing"]

_log = logging.getLogger(__name__)

_MOST_TRIES = 8  # of plans, one after the other
_COME_CLOSER = 1.25  # the next plan need not be smaller than the excess of this one asks for, with some doubt
_LONGEST_BYTES = 2**16


class Rehearsing:
    """The rehearsals of one worker."""

    def __init__(
        self, assignment: Assignment, loaded: Loaded, allowance: Allowance, progress: Progress, *, can_fork: bool
    ) -> None:
        self.rehearsed: Rehearsed | None = None  # of the plan that `tried` has returned
        self._assignment, self._loaded = assignment, loaded
        self._allowance, self._progress = allowance, progress
        self._planner = loaded.planner if isinstance(loaded.planner, Planner) else None  # an accelerator has another
        self._is_possible = can_fork and sys.platform == "linux" and loaded.device.kind == "cpu"
        self._folder = durable.cache_dir()

    def tried(self, plan: TrainingPlan) -> TrainingPlan:
        """The plan with a prediction that was measured, or the first after it that fits.

        Raises `NothingFitsError`.
        """
        planner, budget_bytes = self._planner, self._allowance.budget_bytes
        if planner is None:
            return plan
        room = max(0, budget_bytes - planner.base_bytes)
        for _ in range(_MOST_TRIES if self._is_possible else 0):
            known = self._known(plan, room, planner)
            if known is None:
                return plan
            needed = known.predicted_bytes(self._epochs) + self._allowance.written_bytes
            if not known.over and needed <= room and needed < (planner.ceiling_bytes or sys.maxsize):
                self.rehearsed = known
                return replace(plan, training_bytes=needed, predicted_bytes=planner.base_bytes + needed)
            most = int(planner.rows_bytes(plan) * min(1.0, _COME_CLOSER * room / max(1, needed)))
            smaller = planner.plan_below(plan, most, budget_bytes)
            _log.warning(
                "plan: %s needs %s%s, %s are free; trying %s",
                *(plan.describe(), "more than " if known.over else "", format_bytes(needed)),
                *(format_bytes(room), smaller.describe()),
            )
            plan = smaller
        return plan

    @contextmanager
    def learns_from(self, in_force: PlanInForce) -> Iterator[None]:
        """Keep what training in the body really took, where that is more than the rehearsal had shown, and its time."""
        before, plan, since = self.rehearsed, in_force.plan, time.monotonic()
        is_over = False
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            is_over = is_out_of_memory(error)
            raise
        finally:
            if before is not None and in_force.plan == plan:
                grown = self._allowance.growth_bytes() if not plan.spare_bytes else 0  # more than the plan needs
                peak_bytes = max(before.peak_bytes, grown)
                epochs = max(1, self._epochs)
                epoch_s = before.epoch_s if is_over else round((time.monotonic() - since) / epochs, 4)
                after = replace(before, peak_bytes=peak_bytes, over=is_over, epoch_s=epoch_s)
                if after != before:
                    memory.keep(self._folder, after)

    @property
    def _epochs(self) -> int:
        return self._assignment.run.train.epochs_of(len(self._loaded.data.train))

    def _known(self, plan: TrainingPlan, room: int, planner: Planner) -> Rehearsed | None:
        """What the plan took before, or takes now; None if it cannot be tried here."""
        shapes = self._shapes(plan, planner)
        key = self._key(plan, shapes)
        known = memory.find(self._folder, key)
        if known is not None and not (known.over and known.predicted_bytes(self._epochs) <= room):
            return known
        if not self._assignment.order.train:  # nothing depends on the plan, and there may be no weights to try it with
            return None
        self._progress.report("rehearse", 0, 1)
        known = self._in_a_fork(lambda: self._rehearse(plan, shapes, key, room), key, room)
        self._progress.report("rehearse", 1, 1)
        if known is not None:
            memory.keep(self._folder, known)
        return known

    def _shapes(self, plan: TrainingPlan, planner: Planner) -> Shapes:
        data = self._loaded.data
        evaluated: tuple[int, ...] = ()  # some rounds do without, and the plan is the same
        if self._assignment.device.share.metrics and len(data.test):
            size = evaluation_batch(self._loaded.rows, planner.rows_bytes(plan), plan.microbatch)
            evaluated = memory.pieces_met(len(data.test), size)
        rules = self._loaded.setup.method.plans
        batch = self._assignment.run.train.batch
        return memory.shapes_of(plan, batch, len(data.train), evaluated=evaluated, shorten=not rules.again)

    def _key(self, plan: TrainingPlan, shapes: Shapes) -> str:
        """Everything that a peak depends on; in a later round, a method may have brought more than in the first."""
        run, order, setup = self._assignment.run, self._assignment.order, self._loaded.setup
        section = self._assignment.device.data
        task = self._assignment.device.tasks.get(run.task.name) if run.task is not None else None
        job = job_for(run, setup.method.plans, self._loaded.data.train.shape, task=task, slice_name=setup.architecture)
        return memory.key_of(
            job.key,
            plan,
            shapes,
            to_map(run.method),
            to_map(run.train) | {"epochs": 0, "threads": order.threads},
            section.source if section is not None else "",
            bool(order.method_state) and order.round > 1,
            sum(path.stat().st_size for path in knowledge_paths(order)) >> 20,
        )

    def _rehearse(self, plan: TrainingPlan, shapes: Shapes, key: str, room: int) -> Rehearsed:
        """In the fork, which may do with the model whatever it likes."""
        from edge_client.worker.loading import loop_settings

        assignment, loaded = self._assignment, self._loaded
        order, model = assignment.order, loaded.model
        settings = loop_settings(assignment, plan, channels_last=loaded.rows.channels_last)
        if order.threads > 1:
            torch.set_num_threads(order.threads)
            warm_up(model, settings)
        model.recompute = plan.recompute

        def begin() -> object:
            load_weights(model, model_path(order))
            extra = StoredTensors(model_path(order), EXTRA_PREFIX, device=loaded.device)
            client = begin_client(assignment, loaded, plan, extra)
            seed_generators(order.seed)
            return client

        rehearsal = Rehearsal(
            model=model,
            begin=begin,  # type: ignore[arg-type]
            data=loaded.data.train,
            test=loaded.data.test,
            settings=settings,
            num_classes=len(assignment.run.classes),
            progress=lambda: self._progress.report("rehearse", 0, 1),
        )
        return rehearse(rehearsal, shapes, key=key, limit_bytes=room)

    def _in_a_fork(self, function: Callable[[], Rehearsed], key: str, room: int) -> Rehearsed | None:
        """What `function` returns in a copy of this process; None if it fails, or there can be no copy."""
        num_threads = len(os.listdir("/proc/self/task"))
        if num_threads != 1:
            _log.info("the plan is not rehearsed: a process with %d threads cannot be forked", num_threads)
            return None
        ours, theirs = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._child(function, parent, theirs)
        os.close(theirs)
        with os.fdopen(ours, "rb") as answer:
            text = answer.read(_LONGEST_BYTES)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):  # most likely by the kernel, for want of memory
            return Rehearsed(key=key, peak_bytes=room, over=True)
        try:
            return from_map(Rehearsed, json.loads(text))
        except (ValueError, PayloadError):
            _log.warning("the rehearsal of a plan failed; it is used as it was predicted")
            return None

    def _child(self, function: Callable[[], Rehearsed], parent: int, answer: int) -> None:
        """Does not return: what a failure here means, the worker itself finds out and tells."""
        code = 1
        try:
            guard.die_with_parent(parent)
            guard.raise_oom_score(1000)
            os.write(answer, json.dumps(to_map(function())).encode())
            code = 0
        finally:
            if code:
                _log.warning("while a plan was rehearsed", exc_info=True)
            guard.end(code)
