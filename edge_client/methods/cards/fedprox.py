"""The card of FedProx."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from edge_client.methods.card import Card
from edge_client.records import Between, PlanRules

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProxParameters:
    """Parameters of FedProx."""

    mu: Annotated[float, Between(0, 1000)] = field(
        default=0.01,
        metadata={"symbol": "mu", "help": "weight of the proximal term (mu/2)||w - w_t||^2, equation 2; 0 is FedAvg"},
    )


KEPT_ANCHOR_BYTES = 2**17  # at most: anchors of small parameters, which a device keeps while it trains


def _plans(parameters: FedProxParameters) -> PlanRules:
    """Of one parameter at a time the anchor, which becomes the proximal term's gradient; small anchors stay."""
    return PlanRules(step_copies=1, fixed_bytes=KEPT_ANCHOR_BYTES) if parameters.mu > 0 else PlanRules()


def load(parameters: FedProxParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fedprox import method

    return method(parameters)


CARD = Card(
    name="fedprox",
    paper="Li et al., MLSys 2020, arXiv:1812.06127",
    parameters=FedProxParameters,
    load=load,
    plans=_plans,
)
