"""Which tensors an update has: a function of its plan and its method, the same for who writes it and who checks it.

An update lacks what its method never returns (personal layers, numbers of the server), and what was not trained:
below the skipped blocks, and the stem with them; auxiliary heads that no group of the plan ends at. What depends on the
model stands in the meta of the container that was sent. The server takes each tensor's mean over the updates that have
it. Free of torch.
Does not cover: shapes and codecs (`coordinator/conductor/intake.py`), the mean (`params`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from edge_client.data.input_sums import MEAN, SCALE
from edge_client.errors import PayloadError
from edge_client.methods.base import PlanRules
from edge_client.models.found_units.result import FoundUnits
from edge_client.records import TrainingPlan, from_map, to_map
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX

__all__ = [
    "found_units",
    "missing_tensors",
    "model_meta",
    "never_returned",
    "notes_of",
    "plan_problem",
    "with_never_returned",
]

# keys of a model container's meta
_STEM = "stem"  # the name of the model's first unit, where a plan may leave it untrained
_NEVER_RETURNED = "kept"  # prefixes of the names of tensors that are never sent back
_UNITS = "units"  # of a task's model, as the server found them
_NOTES = "notes"  # what the method's server half must know of the model


def model_meta(
    rules: PlanRules,
    *,
    stem: str,
    never_returned: Sequence[str],
    notes: Mapping[str, Any] | None = None,
    units: FoundUnits | None = None,
) -> dict[str, Any]:
    """The meta of a model's container, from which the other functions here know the model."""
    meta: dict[str, Any] = {_STEM: stem} if rules.partial else {}
    return (
        meta
        | ({_NEVER_RETURNED: list(never_returned)} if never_returned else {})
        | ({_NOTES: dict(notes)} if notes else {})
        | ({_UNITS: to_map(units)} if units is not None else {})
    )


def found_units(meta: Mapping[str, Any]) -> FoundUnits | None:
    """The units that the server found, if it looked for any; raises `PayloadError`."""
    return from_map(FoundUnits, meta[_UNITS], where="units of the model") if _UNITS in meta else None


def notes_of(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """The method's notes about the model, for its server half."""
    notes: Mapping[str, Any] = meta.get(_NOTES, {})
    return notes


def never_returned(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Prefixes of the names of tensors that are never sent back; raises `PayloadError`."""
    prefixes = meta.get(_NEVER_RETURNED, ())
    if not isinstance(prefixes, (list, tuple)) or not all(isinstance(prefix, str) for prefix in prefixes):
        raise PayloadError("malformed", f"expected a list of names for {_NEVER_RETURNED!r}, got {prefixes!r:.80}")
    return tuple(prefixes)


def with_never_returned(meta: Mapping[str, Any], prefixes: Sequence[str]) -> dict[str, Any]:
    """The same meta, for a model of which other tensors are never sent back."""
    return {**meta, _NEVER_RETURNED: list(prefixes)}


def missing_tensors(
    names: Iterable[str], plan: TrainingPlan | None, rules: PlanRules, meta: Mapping[str, Any]
) -> frozenset[str]:
    """The tensors that were sent and do not come back; names are a container's, with their prefix."""
    names = list(names)
    skipped = plan.skipped if plan is not None and rules.masked else ()
    units = [str(meta.get(_STEM, "")), *skipped] if skipped else []
    found = found_units(meta) if units else None
    untrained = frozenset(_tensors_of(found, units, names) if found is not None else ())
    prefixes = (*never_returned(meta), *(f"{MODEL_PREFIX}{unit}." for unit in units if found is None))
    ends = [group[-1] for group in plan.groups[:-1] if group] if plan is not None else []
    used_heads = tuple(f"{EXTRA_PREFIX}{end}." for end in ends)
    drops_heads = rules.masked and rules.auxiliary
    return frozenset(
        name
        for name in names
        if name.startswith(prefixes)
        or name in untrained
        or (drops_heads and name.startswith(EXTRA_PREFIX) and not name.startswith(used_heads))
    )


def _tensors_of(found: FoundUnits, units: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Tensors of found units, whose names do not begin with that of their unit; names are a container's, in order."""
    added = {MODEL_PREFIX + name for name in (MEAN, SCALE)}  # by train.normalise, after the units were found
    tensors = found.tensors([name for name in names if name.startswith(MODEL_PREFIX) and name not in added])
    unknown = [unit for unit in units if unit not in tensors]
    if unknown:
        raise PayloadError("plan", f"the plan skips {unknown[0]!r}, which is no unit of the model")
    return (name for unit in units for name in tensors[unit])


def plan_problem(plan: TrainingPlan, rules: PlanRules) -> str:
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
