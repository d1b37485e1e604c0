"""Which tensors an update has: a function of its plan and its method, the same for who writes it and who checks it.

An update lacks what its method keeps where it is (personal layers, the server's own numbers), and what was not trained:
below the skipped blocks, and the stem with them; auxiliary heads that no group of the plan ends at. What depends on the
model stands in the meta of the container that was sent. The server takes each tensor's mean over the updates that have
it. Free of torch.
Does not cover: shapes and codecs (`coordinator/conductor/intake.py`), the mean (`params`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge_client.errors import PayloadError
from edge_client.methods.base import PlanRules
from edge_client.records import TrainingPlan
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX

__all__ = ["describe", "keeping", "kept", "left_out", "notes", "problem"]

# keys of a model container's meta
_STEM = "stem"  # the name of the model's first unit, where a plan may leave it untrained
_KEPT = "kept"  # what the names of tensors begin with that are never sent back
_NOTES = "notes"  # what the method's server half must know of the model


def describe(
    rules: PlanRules, *, stem: str, kept: Sequence[str], notes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The meta of a model's container, from which `left_out` and `notes` know the model."""
    meta: dict[str, Any] = {_STEM: stem} if rules.partial else {}
    return meta | ({_KEPT: list(kept)} if kept else {}) | ({_NOTES: dict(notes)} if notes else {})


def notes(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the method noted of the model."""
    noted: Mapping[str, Any] = meta.get(_NOTES, {})
    return noted


def kept(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """What the names of tensors begin with that are never sent back."""
    told = meta.get(_KEPT, ())
    if not isinstance(told, (list, tuple)) or not all(isinstance(beginning, str) for beginning in told):
        raise PayloadError("malformed", f"expected a list of names for {_KEPT!r}, got {told!r:.80}")
    return tuple(told)


def keeping(meta: Mapping[str, Any], kept: Sequence[str]) -> dict[str, Any]:
    """The same meta, for a model of which other tensors are never sent back."""
    return {**meta, _KEPT: list(kept)}


def left_out(
    names: Iterable[str], plan: TrainingPlan | None, rules: PlanRules, meta: Mapping[str, Any]
) -> frozenset[str]:
    """Those of the tensors that were sent which do not come back; names are a container's, with their prefix."""
    beginnings = (*kept(meta), *(_untrained(plan, str(meta.get(_STEM, ""))) if rules.masked else ()))
    ends = [group[-1] for group in plan.groups[:-1] if group] if plan is not None else []
    used = tuple(f"{EXTRA_PREFIX}{end}." for end in ends)
    unused = rules.masked and rules.auxiliary
    return frozenset(
        name
        for name in names
        if name.startswith(beginnings) or (unused and name.startswith(EXTRA_PREFIX) and not name.startswith(used))
    )


def _untrained(plan: TrainingPlan | None, stem: str) -> tuple[str, ...]:
    skipped = (stem, *plan.skipped) if plan is not None and plan.skipped else ()
    return tuple(f"{MODEL_PREFIX}{unit}." for unit in skipped)


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
