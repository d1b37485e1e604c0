"""The card of DraftFed."""

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
class DraftFedParameters:
    """Parameters of DraftFed."""

    public: Annotated[str, Matches(r"(?s).{0,2000}")] = field(
        default="", metadata={"symbol": "G", "help": "the shared samples, on the server: SOURCE:PATH"}
    )
    public_samples: Annotated[int, Between(1, 10**6)] = field(
        default=512, metadata={"symbol": "G", "help": "how many of them, drawn once; devices keep them"}
    )
    draft_batch: Annotated[int, Between(0, 10**6)] = field(
        default=128, metadata={"symbol": "-", "help": "shared samples of one round, in turn; 0: all"}
    )
    lambda1: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "lambda_1", "help": "weight of the first convolution's draft"}
    )
    lambda2: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "lambda_2", "help": "weight of the last convolution's draft"}
    )
    lambda3: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "lambda_3", "help": "weight of the logits' draft"}
    )
    draft_epochs: Annotated[int, Between(0, 1000)] = field(
        default=1, metadata={"symbol": "-", "help": "passes towards the targets; 0: alone"}
    )
    mask_padding: bool = field(
        default=False,
        metadata={"symbol": "Eq. 7", "help": "average each channel over the models that have it, without zeros"},
    )
    warmup_rounds: Annotated[int, Between(0, 10**6)] = field(
        default=1, metadata={"symbol": "-", "help": "first rounds whose drafts nobody learns from"}
    )


_MAX_DRAFT_BYTES = 2**30


def _plans(parameters: DraftFedParameters) -> PlanRules:
    """Learning from shared samples has an optimizer of its own, whose state stays; and it looks inside of units."""
    return PlanRules(optimizers=2, recomputes=False) if parameters.draft_epochs else PlanRules()


def _knowledge(parameters: DraftFedParameters) -> KnowledgeRules:
    return KnowledgeRules(
        kinds=("drafts",), public=True, max_rows=parameters.public_samples, max_bytes=_MAX_DRAFT_BYTES
    )


def load(parameters: DraftFedParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.draftfed import method

    return method(parameters)


CARD = Card(
    name="draftfed",
    paper="Liao et al., DraftFed",
    parameters=DraftFedParameters,
    load=load,
    exchange=lambda parameters: Exchange(
        down="targets of drafts (shared samples and the first model, once)",
        up="drafts for shared samples",
        device="model and the states of its optimizers",
    ),
    plans=_plans,
    knowledge=_knowledge,
    has_global_model=lambda parameters: False,
    shares_weights=False,
    refuses=NOT_IN_GROUPS | NOT_UNDER_INCO,
)
