"""Plans of a worker that trains on an accelerator: both memories fit, and the accelerator's is counted as reserved.

    search     candidates by what their tensors take there, in the method's order (`planning.planner`)
    replay     what the allocator would reserve for a candidate: too much, and the next one is taken
    rehearsal  the candidate's steps on the accelerator under its hard limit; the measured peak is what is promised

A plan that has no tensors' sequence gets a looser bound, one that was not rehearsed the replay's. The host has the
process, a batch on its way, and tensors of the update one by one.
Covers: choosing. Does not cover: recording and rehearsing, which are given as functions, the memory's budget
(`accelerator_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edge_client.config.quantities import format_bytes
from edge_client.errors import NothingFitsError
from edge_client.measuring.plan_search import PlanSearch
from edge_client.planning.allocation_sequence import WORKSPACE_BYTES, AllocationSequence, Sizes, bound_bytes, reserved
from edge_client.planning.rows import ModelRows
from edge_client.records import Ceiling, TrainingPlan
from edge_client.worker.accelerator_memory import AcceleratorMemory

__all__ = ["AcceleratorPlanner", "Measured", "without_hidden"]

_HOST_BYTES = 32 * 10**6  # that training adds to the process on the host, beside samples and tensors on their way
_UNRECORDED_SHARE = 1.5  # of the tensors, where no sequence could be recorded
_PROMISE_SHARE = 1.02  # of a rehearsal's peak: later epochs may allocate in another order


def without_hidden(rows: ModelRows) -> ModelRows:
    """Rows of the CPU without what its libraries take: on an accelerator that is counted with the context."""
    modes = {
        mode: tuple(replace(unit, hidden_bytes=0, hidden_size_bytes=0) for unit in units)
        for mode, units in rows.modes.items()
    }
    return replace(rows, hidden_bytes=0, hidden_size_bytes=0, hidden_rest_bytes=0, modes=modes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a rehearsal on the accelerator."""

    peak_bytes: int  # that torch reserved
    over: bool = False  # the limit refused it


Sequences = Callable[[TrainingPlan], AllocationSequence | None]
Rehearse = Callable[[TrainingPlan, int], Measured]  # (plan, bytes that torch may reserve)


@dataclass(slots=True, kw_only=True)
class AcceleratorPlanner:
    """Chooses plans for one warm worker; everything but the budgets stays the same while it works."""

    search: PlanSearch
    memory: AcceleratorMemory
    fingerprint: str
    host_bytes: int  # of the worker process, warmed up
    batch_bytes: int  # of a batch of samples on the host
    largest_bytes: int  # of one tensor of the update
    weight_bytes: int  # of the model, on the accelerator
    ceiling_bytes: int | None = None  # of training, in this lease
    ceilings: Sequence[Ceiling] = ()  # of the accelerator's memory, in earlier work
    training_budget_bytes: int | None = None  # instead of a budget of the whole: a simulation's
    sequences: Sequences = lambda plan: None
    rehearse: Rehearse | None = None

    @property
    def base_bytes(self) -> int:
        """What training adds to, on the host."""
        return self.host_bytes

    def first_plan(self, offered: TrainingPlan | None, budget_bytes: int) -> TrainingPlan:
        """The plan of the assignment while it fits: it may have been made for another device. Else a new one.

        Raises `NothingFitsError` if nothing fits, whatever is offered.
        """
        if offered is not None and offered.accelerator == self.fingerprint and offered.slice == self.search.slice_name:
            accelerator_bytes = self._accelerator_budget(budget_bytes)
            ceiling = self._ceiling(accelerator_bytes)
            if ceiling is None or 0 < offered.training_bytes < ceiling:
                needed = self._needed(offered, accelerator_bytes)
                if needed is not None and 10 * offered.accelerator_budget_bytes >= 9 * accelerator_bytes:
                    return self._complete(offered, needed, accelerator_bytes, budget_bytes)
        return self.new_plan(budget_bytes)

    def new_plan(self, budget_bytes: int) -> TrainingPlan:
        """The best plan for the host's budget, and the accelerator's; raises `NothingFitsError`."""
        accelerator_bytes = self._accelerator_budget(budget_bytes)
        room = accelerator_bytes - self.memory.context_bytes - self.weight_bytes
        ceiling = self._ceiling(accelerator_bytes)
        while True:
            plan = self._search(room, ceiling, accelerator_bytes)
            needed = self._needed(plan, accelerator_bytes)
            if needed is not None:
                return self._complete(plan, needed, accelerator_bytes, budget_bytes)
            ceiling = plan.training_bytes

    def smaller_plan(self, plan: TrainingPlan, budget_bytes: int) -> TrainingPlan:
        """The same plan in smaller pieces, or another way to train; raises `NothingFitsError`.

        In the middle of a training nothing is rehearsed: the replay bounds it.
        """
        rehearse, self.rehearse = self.rehearse, None
        try:
            return self._shrunk(plan, budget_bytes) or self.new_plan(budget_bytes)
        finally:
            self.rehearse = rehearse

    def _shrunk(self, plan: TrainingPlan, budget_bytes: int) -> TrainingPlan | None:
        accelerator_bytes = self._accelerator_budget(budget_bytes)
        room = accelerator_bytes - self.memory.context_bytes - self.weight_bytes
        smaller: TrainingPlan | None = plan
        while smaller is not None:
            smaller = self.search.shrink(smaller, 0, max(0, room), self._ceiling(accelerator_bytes))
            needed = self._needed(smaller, accelerator_bytes) if smaller is not None else None
            if smaller is not None and needed is not None:
                return self._complete(smaller, needed, accelerator_bytes, budget_bytes)
        return None

    def fits(self, plan: TrainingPlan, budget_bytes: int) -> bool:
        """Whether a plan is inside of the budgets as they are now."""
        host_fits = plan.predicted_bytes <= budget_bytes
        return host_fits and (self.memory.is_unified or plan.accelerator_predicted_bytes <= self.memory.budget_bytes)

    def limit_bytes(self, plan: TrainingPlan) -> int:
        """What a worker may have of the accelerator by a plan, its context included."""
        if self.memory.is_unified:
            return plan.budget_bytes - self._host_predicted()
        return plan.accelerator_budget_bytes

    def _accelerator_budget(self, budget_bytes: int) -> int:
        if self.training_budget_bytes is not None:
            return self.memory.context_bytes + self.weight_bytes + self.training_budget_bytes
        return budget_bytes - self._host_predicted() if self.memory.is_unified else self.memory.budget_bytes

    def _host_predicted(self) -> int:
        return self.host_bytes + 2 * self.batch_bytes + 2 * self.largest_bytes + _HOST_BYTES

    def _ceiling(self, accelerator_bytes: int) -> int | None:
        known = [one.training_bytes for one in self.ceilings if accelerator_bytes <= one.budget_bytes]
        return min([*known, *([self.ceiling_bytes] if self.ceiling_bytes is not None else [])], default=None)

    def _search(self, room: int, ceiling: int | None, accelerator_bytes: int) -> TrainingPlan:
        try:
            return self.search.plan(0, max(0, room), ceiling)
        except NothingFitsError as error:
            context, weights = format_bytes(self.memory.context_bytes), format_bytes(self.weight_bytes)
            least = error.least_bytes
            needs = f"the smallest plan takes {format_bytes(least)} of tensors" if least is not None else str(error)
            raise NothingFitsError(
                f"nothing fits on the accelerator: {needs} beside a context of {context} and weights of {weights}, "
                f"the budget is {format_bytes(max(0, accelerator_bytes))}; see limits.accelerator-memory"
                f"{' and limits.memory, which is the sum of both' if self.memory.is_unified else ''}, "
                "end other programs that use the accelerator, or take a smaller model"
            ) from error

    def _needed(self, plan: TrainingPlan, accelerator_bytes: int) -> int | None:
        """What the accelerator must have for this plan, its context included; None if that is too much."""
        room = accelerator_bytes - self.memory.context_bytes
        sequence, sizes = self.sequences(plan), self._sizes(plan)
        if sequence is None:
            needed = int((self.weight_bytes + plan.training_bytes) * _UNRECORDED_SHARE) + WORKSPACE_BYTES
        else:
            needed = bound_bytes(sequence, sizes)
            if reserved(sequence, sizes).peak_reserved_bytes > room:
                return None
        if self.rehearse is not None:
            measured = self.rehearse(plan, room)
            needed = room + 1 if measured.over else int(measured.peak_bytes * _PROMISE_SHARE)
        return needed + self.memory.context_bytes if needed <= room else None

    def _sizes(self, plan: TrainingPlan) -> Sizes:
        batch = self.search.run.train.batch
        return Sizes.of(batch=batch, microbatch=plan.microbatch, num_samples=self.search.num_samples)

    def _complete(self, plan: TrainingPlan, needed: int, accelerator_bytes: int, budget_bytes: int) -> TrainingPlan:
        """The plan with what it takes of both memories."""
        host, unified = self._host_predicted(), self.memory.is_unified
        if host > budget_bytes:
            raise NothingFitsError(
                f"a worker that trains on the accelerator uses {format_bytes(host)} on the host, the budget is "
                f"{format_bytes(budget_bytes)}; see limits.memory"
            )
        return replace(
            plan,
            budget_bytes=budget_bytes,
            predicted_bytes=host + needed if unified else host,
            accelerator=self.fingerprint,
            accelerator_budget_bytes=0 if unified else accelerator_bytes,
            accelerator_predicted_bytes=0 if unified else needed,
        )
