"""The card of FedGKT."""

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
class FedGktParameters:
    """Parameters of FedGKT."""

    alpha: Annotated[float, Between(0, 1000)] = field(
        default=0.5, metadata={"symbol": "alpha", "help": "weight of the distillation, on both sides; 0: without"}
    )
    temperature: Annotated[float, Between(0.001, 1000)] = field(
        default=3.0, metadata={"symbol": "T", "help": "divides logits in the distillation"}
    )
    server_epochs: Annotated[int, Between(1, 1000)] = field(
        default=1, metadata={"symbol": "E_s", "help": "passes of the server over all received features"}
    )
    server_lr: Annotated[float, Between(0, 10)] = field(
        default=1e-3, metadata={"symbol": "-", "help": "learning rate of the server's part (Adam)"}
    )
    max_bytes: Annotated[int, Between(1, 2**40)] = field(
        default=16 * 2**20,
        metadata={"symbol": "-", "help": "features, logits and labels that a device sends in a round, in bytes"},
    )


def _knowledge(parameters: FedGktParameters) -> KnowledgeRules:
    """What a device has beyond its features' bytes are the ids of its samples."""
    return KnowledgeRules(kinds=("maps",), per_device=True, max_rows=10**6, max_bytes=parameters.max_bytes + 2**20)


def load(parameters: FedGktParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fedgkt import method

    return method(parameters)


CARD = Card(
    name="fedgkt",
    paper="He et al., NeurIPS 2020, arXiv:2007.14513",
    parameters=FedGktParameters,
    load=load,
    exchange=lambda parameters: Exchange(
        down="the server's logits for its samples (the first model, once)",
        up="feature maps, labels and logits of its samples",
        device="model, the state of its optimizer, the server's logits",
    ),
    knowledge=_knowledge,
    has_global_model=lambda parameters: False,
    shares_weights=False,
    refuses=NOT_IN_GROUPS | NOT_UNDER_INCO,
)
