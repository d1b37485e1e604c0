"""Which tensors an update has: a function of its plan and its method, the same for who writes it and who checks it.

An update lacks what was not trained: below the skipped blocks, and the stem with them; auxiliary heads that no group of
the plan ends at. The server takes each tensor's mean over the updates that have it. Free of torch.
Does not cover: shapes and codecs (`coordinator/intake.py`), the mean (`params`).
"""

from __future__ import annotations

from collections.abc import Iterable

from edge_client.methods.base import PlanRules
from edge_client.records import TrainingPlan
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX

__all__ = ["STEM", "left_out", "problem"]

STEM = "stem"  # key of a model container's meta: the name of its first unit, where a plan may leave it untrained


def left_out(names: Iterable[str], plan: TrainingPlan | None, rules: PlanRules, stem: str) -> frozenset[str]:
    """Those of the tensors that were sent which do not come back; names are a container's, with their prefix."""
    if not rules.masked:
        return frozenset()
    skipped = (stem, *plan.skipped) if plan is not None and plan.skipped else ()
    untrained = tuple(f"{MODEL_PREFIX}{unit}." for unit in skipped)
    ends = [group[-1] for group in plan.groups[:-1] if group] if plan is not None else []
    used = tuple(f"{EXTRA_PREFIX}{end}." for end in ends)
    return frozenset(
        name
        for name in names
        if name.startswith(untrained)
        or (rules.auxiliary and name.startswith(EXTRA_PREFIX) and not name.startswith(used))
    )


def problem(plan: TrainingPlan, rules: PlanRules) -> str:
    """Why a device of a run with this method cannot have trained by such a plan; empty if it can."""
    trained = [block for group in plan.groups for block in group]
    if plan.groups and not rules.groups:
        return f"it has {len(plan.groups)} groups, the run's method trains all blocks at once"
    if plan.skipped and not rules.partial:
        return f"it skips {len(plan.skipped)} blocks, the run's method trains all of them"
    if plan.skipped and not trained:
        return f"it skips {len(plan.skipped)} blocks and trains none"
    if len({*plan.skipped, *trained}) != len(plan.skipped) + len(trained):
        return "it names a block twice"
    if plan.num_models > rules.max_models:
        return f"it has {plan.num_models} models, the run's method allows {rules.max_models}"
    return ""
