"""The card of FedHe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from edge_client.knowledge.schema import KnowledgeRules
from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.methods.cards.inco import NOT_UNDER_INCO
from edge_client.records import Between

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FedHeParameters:
    """Parameters of FedHe."""

    alpha: Annotated[float, Between(0, 1000)] = field(
        default=0.5, metadata={"symbol": "alpha", "help": "weight of the distance to class means of logits; 0: alone"}
    )


def load(parameters: FedHeParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fedhe import method

    return method(parameters)


CARD = Card(
    name="fedhe",
    paper="Chan and Ngai, MSN 2021, arXiv:2110.09910",
    parameters=FedHeParameters,
    load=load,
    exchange=lambda parameters: Exchange(
        down="class means of logits (the first model, once)",
        up="its own class means of logits",
        device="model and the state of its optimizer",
    ),
    knowledge=lambda parameters: KnowledgeRules(kinds=("class/logit",)),
    has_global_model=lambda parameters: False,
    shares_weights=False,
    refuses=NOT_IN_GROUPS | NOT_UNDER_INCO,
)
