"""The card of FeDepth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from edge_client.methods.card import Card, Exchange
from edge_client.methods.slices import Slicing
from edge_client.records import Between, Matches, PlanRules

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FeDepthParameters:
    """Parameters of FeDepth and m-FeDepth."""

    budget_mode: Annotated[str, Matches("per_group|split")] = field(
        default="per_group",
        metadata={
            "symbol": "problem (1)",
            "help": "per_group: each group is trained for train.epochs; split: the groups share them",
        },
    )
    partial: bool = field(
        default=True,
        metadata={
            "symbol": "partial training",
            "help": "the first blocks may stay untrained on a device that cannot train them even one by one",
        },
    )
    averaging: Annotated[str, Matches("masked|plain")] = field(
        default="masked",
        metadata={
            "symbol": "p_k",
            "help": "masked: a tensor's mean is over the devices that trained it; plain: over all, trained or not",
        },
    )
    bypass: bool = field(
        default=False,
        metadata={
            "symbol": "partial training",
            "help": "jump over untrained blocks instead of running them; what they take and give must have one shape",
        },
    )
    mutual: Annotated[int, Between(1, 8)] = field(
        default=1,
        metadata={"symbol": "M", "help": "models at most that a device with surplus memory trains side by side"},
    )
    cost: Annotated[str, Matches("measured|table-1")] = field(
        default="measured",
        metadata={
            "symbol": "Table 1",
            "help": "what a group takes: measured, or by the authors' own rule, to compare results with theirs",
        },
    )


# why a method refuses to be under FeDepth or m-FeDepth
NOT_IN_GROUPS = dict.fromkeys(("fedepth", "m-fedepth"), "its rule is for a model whose parts are trained at once")


def exchange(parameters: FeDepthParameters) -> Exchange:
    """Whatever method is underneath."""
    return Exchange(
        down="model", up="what was trained of model", device="weights of its other models, if mutual is above 1"
    )


def plans(parameters: FeDepthParameters) -> PlanRules:
    """The planner chooses the groups."""
    return PlanRules(
        groups=True,
        partial=parameters.partial,
        max_models=parameters.mutual,
        masked=parameters.averaging == "masked",
        cost=parameters.cost,
    )


def slicing(parameters: FeDepthParameters) -> Slicing:
    """Every device trains the whole model."""
    return Slicing(kinds=(), instead="it fits the whole model into the memory by training it in groups")


def load(parameters: FeDepthParameters, base: Method) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fedepth import method

    return method(parameters, base)


CARD = Card(
    name="fedepth",
    paper="Zhang et al., arXiv:2303.04887",
    parameters=FeDepthParameters,
    load=load,
    over=True,
    exchange=exchange,
    plans=plans,
    slicing=slicing,
)
