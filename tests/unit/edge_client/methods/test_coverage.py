"""Which tensors an update has, by its plan: the rule that devices write by and the coordinator checks by."""

from __future__ import annotations

from typing import Any

import pytest

from edge_client.errors import PayloadError
from edge_client.methods.base import PlanRules
from edge_client.methods.coverage import missing_tensors, model_meta, never_returned, plan_problem
from edge_client.records import TrainingPlan

NAMES = [
    "model/stem.w",
    "model/block1.w",
    "model/block10.w",
    "model/block2.w",
    "model/head.w",
    "extra/block1.w",
    "extra/block10.w",
]
PARTIAL = PlanRules(groups=True, partial=True)
AUXILIARY = PlanRules(groups=True, partial=True, auxiliary=True)


def _plan(groups: list[list[str]], skipped: list[str] | None = None, **more: Any) -> TrainingPlan:
    return TrainingPlan(
        groups=tuple(tuple(group) for group in groups),
        skipped=tuple(skipped or ()),
        microbatch=1,
        budget_bytes=0,
        predicted_bytes=0,
        **more,
    )


@pytest.mark.parametrize(
    ("plan", "rules", "expected"),
    [
        (None, PARTIAL, []),
        (_plan([]), PARTIAL, []),
        (_plan([["block2"]], ["block1"]), PARTIAL, ["model/stem.w", "model/block1.w"]),
        (_plan([["block1", "block10"], ["block2"]]), PARTIAL, []),
        (None, AUXILIARY, ["extra/block1.w", "extra/block10.w"]),
        (_plan([["block1", "block10", "block2"]]), AUXILIARY, ["extra/block1.w", "extra/block10.w"]),
        (_plan([["block1"], ["block10", "block2"]]), AUXILIARY, ["extra/block10.w"]),
        (_plan([["block10"], ["block2"]], ["block1"]), AUXILIARY, ["model/stem.w", "model/block1.w", "extra/block1.w"]),
        (_plan([["block2"]], ["block1"]), PlanRules(groups=True, partial=True, auxiliary=True, masked=False), []),
    ],
)
def test_what_a_plan_leaves_untrained_is_left_out(
    plan: TrainingPlan | None, rules: PlanRules, expected: list[str]
) -> None:
    """Skipped blocks and with them the stem; heads of blocks that no group but the last ends at; nothing when plain.

    `block1` is no part of `block10`.
    """
    assert missing_tensors(NAMES, plan, rules, {"stem": "stem"}) == frozenset(expected)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (("model/head.",), ["model/head.w"]),
        (("model/",), NAMES[:5]),
        (("extra/block10",), ["extra/block10.w"]),
        ((), []),
    ],
)
def test_what_a_method_keeps_is_left_out_whatever_the_plan(kept: tuple[str, ...], expected: list[str]) -> None:
    """Described by the method, in the form in which a container's meta comes back; also where the mean is plain."""
    for rules in (PlanRules(), PlanRules(masked=False)):
        meta = model_meta(rules, stem="stem", never_returned=kept)
        assert meta == ({"kept": list(kept)} if kept else {})
        assert missing_tensors(NAMES, None, rules, meta) == frozenset(expected)
    assert model_meta(PARTIAL, stem="stem", never_returned=()) == {"stem": "stem"}


@pytest.mark.parametrize(
    ("plan", "rules", "message"),
    [
        (_plan([["a"], ["b"]]), PARTIAL, ""),
        (_plan([]), PlanRules(), ""),
        (_plan([["a"], ["b"]]), PlanRules(), "it has 2 groups, the run's method trains all blocks at once"),
        (_plan([["b"]], ["a"]), PlanRules(groups=True), "it skips 1 blocks, the run's method trains all of them"),
        (_plan([], ["a"]), PARTIAL, "it skips 1 blocks and trains none"),
        (_plan([["a", "b"]], ["a"]), PARTIAL, "it names a block twice"),
        (_plan([], num_models=2), PARTIAL, "it has 2 models, the run's method allows 1"),
    ],
)
def test_a_plan_that_the_method_does_not_allow_is_told(plan: TrainingPlan, rules: PlanRules, message: str) -> None:
    """Nobody could have trained by it in this run."""
    assert plan_problem(plan, rules) == message


@pytest.mark.parametrize("told", [5, "model/", [b"model/"], {"model/": 1}])
def test_names_that_make_no_sense_are_refused(told: object) -> None:
    """They come with the model, from outside."""
    assert never_returned({"kept": ["model/head."]}) == ("model/head.",)
    with pytest.raises(PayloadError, match="expected a list of names for 'kept', got"):
        never_returned({"kept": told})
