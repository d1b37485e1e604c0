"""Memory that a worker may keep from batch to batch, where its budget has room for that: training is faster.

A worker gives freed tensors back to the system at once, so that it never uses more than its tensors need
(`guard.pin_malloc`). Every batch then gets new pages, which the kernel has to clear: as much CPU time as the training
itself. Where the budget allows several times what the plan needs, freed memory stays with the process. It is then in
pieces, and takes up to twice as much again.
Covers: the rule, and what it adds to a plan's prediction. Does not cover: malloc (`guard`), when memory becomes less
(`plan_in_force`).
"""

from __future__ import annotations

from dataclasses import replace

from edge_client.records import TrainingPlan

__all__ = ["with_spare", "without_spare"]

_COPIES = 2  # of the training's memory, for the pieces between its tensors
_LEAST_BYTES = 32 * 2**20  # of small trainings


def with_spare(plan: TrainingPlan, budget_bytes: int) -> TrainingPlan:
    """The same plan with spare memory, if the budget has room for it; its prediction contains it."""
    lean = without_spare(plan)
    spare_bytes = _COPIES * lean.training_bytes + _LEAST_BYTES
    if max(lean.predicted_bytes, lean.private_predicted_bytes) + spare_bytes > budget_bytes:
        return lean
    return _with_more(lean, spare_bytes)


def without_spare(plan: TrainingPlan) -> TrainingPlan:
    """The same plan when all freed memory is given back."""
    return _with_more(plan, -plan.spare_bytes) if plan.spare_bytes else plan


def _with_more(plan: TrainingPlan, num_bytes: int) -> TrainingPlan:
    private = plan.private_predicted_bytes
    return replace(
        plan,
        predicted_bytes=plan.predicted_bytes + num_bytes,
        private_predicted_bytes=private + num_bytes if private else 0,
        spare_bytes=plan.spare_bytes + num_bytes,
    )
