"""The card of MOON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.records import Between, PlanRules

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonParameters:
    """Parameters of MOON."""

    mu: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "mu", "help": "weight of the contrastive loss; 0 is FedAvg"}
    )
    temperature: Annotated[float, Between(0.001, 1000)] = field(
        default=0.5, metadata={"symbol": "tau", "help": "divides the cosines in the contrastive loss"}
    )


def _plans(parameters: MoonParameters) -> PlanRules:
    """The received model and the previous one; they run without gradient before the trained one does, and need less."""
    return PlanRules(weight_copies=2) if parameters.mu > 0 else PlanRules()


def load(parameters: MoonParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.moon import method

    return method(parameters)


CARD = Card(
    name="moon",
    paper="Li et al., CVPR 2021, arXiv:2103.16257",
    parameters=MoonParameters,
    load=load,
    exchange=lambda parameters: Exchange(device="model after its last round"),
    plans=_plans,
    refuses=NOT_IN_GROUPS,
)
