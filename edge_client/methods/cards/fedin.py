"""The card of FedIN."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from edge_client.knowledge.schema import KnowledgeRules
from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.methods.cards.fedprox import KEPT_ANCHOR_BYTES
from edge_client.methods.cards.inco import NOT_UNDER_INCO
from edge_client.records import Between, Matches, PlanRules

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FedInParameters:
    """Parameters of FedIN."""

    mu: Annotated[float, Between(0, 1000)] = field(
        default=0.1, metadata={"symbol": "mu", "help": "weight of the proximal term (mu/2)||w - w_t||^2; 0: without"}
    )
    alleviation: Annotated[str, Matches("weighted|projection|sequential")] = field(
        default="weighted",
        metadata={
            "symbol": "Eq. 13, 14",
            "help": "how the two gradients meet: their sum (14), a projection (13), or one step after the other",
        },
    )
    rescale_outer: bool = field(
        default=False,
        metadata={"symbol": "lambda", "help": "weighted: extractor and classifier get their whole gradient, not half"},
    )
    pairs: Annotated[int, Between(0, 4096)] = field(
        default=16, metadata={"symbol": "S", "help": "feature pairs up and down; 0: without them, which is FedProx"}
    )
    pool_batches: Annotated[int, Between(1, 10**4)] = field(
        default=20, metadata={"symbol": "-", "help": "uploads of pairs of one signature that the server keeps"}
    )
    uniform: bool = field(
        default=False,
        metadata={"symbol": "Eq. 2", "help": "all devices count the same in a layer's mean; false: by their samples"},
    )


def _plans(parameters: FedInParameters) -> PlanRules:
    """As FedProx; all gradients are there while the pairs go through; where two are compared, both are."""
    projects, steps = parameters.alleviation == "projection", parameters.alleviation == "sequential"
    separate_gradients = projects or (not steps and parameters.rescale_outer)
    return PlanRules(
        step_copies=2 if projects else int(parameters.mu > 0),
        fixed_bytes=KEPT_ANCHOR_BYTES if parameters.mu > 0 else 0,
        again=parameters.pairs,
        separate_gradients=separate_gradients and parameters.pairs > 0,
        optimizers=2 if steps and parameters.pairs else 1,
    )


def _knowledge(parameters: FedInParameters) -> KnowledgeRules:
    kinds = ("pairs",) if parameters.pairs else ()
    return KnowledgeRules(kinds=kinds, per_device=True, max_rows=parameters.pairs)


def load(parameters: FedInParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fedin import method

    return method(parameters)


CARD = Card(
    name="fedin",
    paper="Chan et al., arXiv:2304.00759",
    parameters=FedInParameters,
    load=load,
    exchange=lambda parameters: Exchange(down="model, feature pairs of others", up="model, its own feature pairs"),
    plans=_plans,
    knowledge=_knowledge,
    refuses=NOT_IN_GROUPS | NOT_UNDER_INCO,
)
