"""The card of FedMD."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from edge_client.knowledge.schema import KnowledgeRules
from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.methods.cards.inco import NOT_UNDER_INCO
from edge_client.records import Between, Matches, PlanRules

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FedMdParameters:
    """Parameters of FedMD."""

    public: Annotated[str, Matches(r"(?s).{0,2000}")] = field(
        default="", metadata={"symbol": "D_0", "help": "the shared samples, on the server: SOURCE:PATH"}
    )
    public_samples: Annotated[int, Between(1, 10**6)] = field(
        default=1000, metadata={"symbol": "D_0", "help": "how many of them, drawn once; devices keep them"}
    )
    samples: Annotated[int, Between(0, 10**6)] = field(
        default=0, metadata={"symbol": "N_a", "help": "shared samples of one round, in turn; 0: all"}
    )
    digest_epochs: Annotated[int, Between(0, 1000)] = field(
        default=1, metadata={"symbol": "digest", "help": "passes towards the consensus; 0: alone"}
    )


def _plans(parameters: FedMdParameters) -> PlanRules:
    """Learning from shared samples has an optimizer of its own, whose state stays."""
    return PlanRules(optimizers=2) if parameters.digest_epochs else PlanRules()


def _knowledge(parameters: FedMdParameters) -> KnowledgeRules:
    return KnowledgeRules(kinds=("logits",), public=True, max_rows=parameters.public_samples)


def load(parameters: FedMdParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fedmd import method

    return method(parameters)


CARD = Card(
    name="fedmd",
    paper="Li and Wang, arXiv:1910.03581",
    parameters=FedMdParameters,
    load=load,
    exchange=lambda parameters: Exchange(
        down="mean logits for shared samples (those and the first model, once)",
        up="logits for shared samples",
        device="model and the states of its optimizers",
    ),
    plans=_plans,
    knowledge=_knowledge,
    has_global_model=lambda parameters: False,
    shares_weights=False,
    refuses=NOT_IN_GROUPS | NOT_UNDER_INCO,
)
