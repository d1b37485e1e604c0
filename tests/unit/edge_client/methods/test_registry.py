"""What the registry answers about a method, and of several over one another."""

from __future__ import annotations

from typing import Any

import pytest

from edge_client.methods import registry
from edge_client.methods.base import Exchange


def test_papers_of_all_parts_are_named_but_that_of_plain_fedavg() -> None:
    """Nobody cites FedAvg for what is put over it; alone it has a paper, too."""
    papers = {name: registry.paper(name) for name in ("fedavg", "fedprox", "fedepth", "inco")}
    assert "AISTATS 2017" in papers["fedavg"]
    assert registry.paper("fedepth+fedprox") == f"{papers['fedepth']}; {papers['fedprox']}"
    assert registry.paper("inco+fedavg") == papers["inco"]
    assert registry.get("inco+fedepth+fedprox", {}).paper == "; ".join(
        papers[n] for n in ("inco", "fedepth", "fedprox")
    )


def test_the_first_part_that_says_what_travels_is_asked() -> None:
    """InCo changes nothing of it, FeDepth all; Scaffold without its correction is FedAvg."""
    assert registry.exchange("inco+moon", {}).device == "model after its last round"
    assert registry.exchange("fedepth+fedprox", {}).up == "what was trained of model"
    assert registry.exchange("scaffold", {"correction": False}) == registry.exchange("fedavg", {}) == Exchange()
    assert registry.get("scaffold", {}).exchange == registry.exchange("scaffold", {}) != Exchange()


def test_what_methods_keep_counts_in_the_plan() -> None:
    """Copies of all weights add up over the parts of a name; what a step makes is the largest of them."""
    kept = {name: registry.plan_rules(name, {}).weight_copies for name in registry.names()}
    assert {name: copies for name, copies in kept.items() if copies} == {
        "inco+moon": 2,
        "inco+scaffold": 2,
        "moon": 2,
        "scaffold": 2,
        "splitmix": 21,  # weights, gradients and momentum of seven bases
    }
    rules = registry.plan_rules("fedepth+fedprox", {})
    assert (rules.groups, rules.partial, rules.step_copies) == (True, True, 1)
    assert registry.plan_rules("moon", {"mu": 0}).weight_copies == 0


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, (1, 16, False, 1)),
        ({"mu": 0}, (0, 16, False, 1)),
        ({"pairs": 0}, (1, 0, False, 1)),
        ({"rescale-outer": True}, (1, 16, True, 1)),
        ({"alleviation": "projection", "mu": 0}, (2, 16, True, 1)),
        ({"alleviation": "sequential"}, (1, 16, False, 2)),
    ],
)
def test_what_fedin_needs_counts_in_the_plan(parameters: dict[str, Any], expected: tuple[int, int, bool, int]) -> None:
    """Copies of a parameter, foreign samples, whether their gradients are kept apart, optimizers with a state."""
    rules = registry.plan_rules("fedin", parameters)
    assert (rules.step_copies, rules.again, rules.separate_gradients, rules.optimizers) == expected


def test_learning_from_shared_samples_counts_in_the_plan() -> None:
    """A second optimizer with a state; DraftFed looks inside of units, which then cannot be made again in backward."""
    told = {name: registry.plan_rules(name, {}) for name in ("fedmd", "draftfed", "fedhe")}
    assert {name: rules.optimizers for name, rules in told.items()} == {"fedmd": 2, "draftfed": 2, "fedhe": 1}
    assert {name: rules.recomputes for name, rules in told.items()} == {"fedmd": True, "draftfed": False, "fedhe": True}
    assert registry.plan_rules("draftfed", {"draft-epochs": 0}) == registry.plan_rules("fedhe", {})


@pytest.mark.parametrize("name", registry.names())
def test_methods_that_share_a_measurement_have_the_same_client(name: str) -> None:
    """What differs on the server alone takes no other memory on a device."""
    other = registry.trains_as(name)
    made, measured = registry.get(name, {}), registry.get(other, {})
    assert other == name or type(made.client()) is type(measured.client())
    assert made.plans.weight_copies == measured.plans.weight_copies
