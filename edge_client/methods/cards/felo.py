"""The card of Felo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from edge_client.knowledge.schema import CLASS_KINDS, KnowledgeRules
from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.methods.cards.inco import NOT_UNDER_INCO
from edge_client.methods.slices import Slicing
from edge_client.records import Between, Matches

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FeloParameters:
    """Parameters of Felo."""

    alpha: Annotated[float, Between(0, 1000)] = field(
        default=0.5,
        metadata={"symbol": "alpha", "help": "weight of the distance to class means; 0 is same-architecture FedAvg"},
    )
    kl_reduction: Annotated[str, Matches("batchmean|mean")] = field(
        default="batchmean",
        metadata={"symbol": "KL", "help": "batchmean: sum over classes; mean: their mean, as in the released code"},
    )
    weighting: Annotated[str, Matches("uniform|count")] = field(
        default="uniform",
        metadata={"symbol": "mean", "help": "each device counts once in a class mean, or as its samples are many"},
    )
    max_age: Annotated[int, Between(0, 10**6)] = field(
        default=0,
        metadata={"symbol": "-", "help": "rounds for which what a device said of a class stays; 0: for ever"},
    )


def slicing(parameters: FeloParameters) -> Slicing:
    """Each architecture is a model of its own."""
    return Slicing(sharing="architecture")


def knowledge(parameters: FeloParameters) -> KnowledgeRules:
    """Class means of features and logits; without the distance to them there is no use for any."""
    return KnowledgeRules(kinds=CLASS_KINDS if parameters.alpha > 0 else ())


def load(parameters: FeloParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.felo import method

    return method(parameters)


CARD = Card(
    name="felo",
    paper="Chan and Ngai, arXiv:2210.15527",
    parameters=FeloParameters,
    load=load,
    exchange=lambda parameters: Exchange(
        down="model, class means of features and logits", up="model, its own class means"
    ),
    slicing=slicing,
    knowledge=knowledge,
    refuses=NOT_IN_GROUPS | NOT_UNDER_INCO,
)
