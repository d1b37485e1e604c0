"""The card of FedProto."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from edge_client.knowledge.schema import KnowledgeRules
from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.methods.cards.inco import NOT_UNDER_INCO
from edge_client.records import Between, Matches

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProtoParameters:
    """Parameters of FedProto."""

    ld: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "lambda", "help": "weight of the distance to prototypes; 0: alone"}
    )
    inference: Annotated[str, Matches("prototype|classifier")] = field(
        default="prototype",
        metadata={"symbol": "-", "help": "who answers on a device: the nearest prototype, or the model's classifier"},
    )


def load(parameters: FedProtoParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fedproto import method

    return method(parameters)


CARD = Card(
    name="fedproto",
    paper="Tan et al., AAAI 2022, arXiv:2105.00243",
    parameters=FedProtoParameters,
    load=load,
    exchange=lambda parameters: Exchange(
        down="prototypes (the first model, once)",
        up="its own prototypes",
        device="model and the state of its optimizer",
    ),
    knowledge=lambda parameters: KnowledgeRules(kinds=("class/feature",)),
    has_global_model=lambda parameters: False,
    shares_weights=False,
    refuses=NOT_IN_GROUPS | NOT_UNDER_INCO,
)
