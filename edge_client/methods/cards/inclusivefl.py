"""The card of InclusiveFL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.methods.slices import Slicing
from edge_client.records import Between

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class InclusiveFLParameters:
    """Parameters of InclusiveFL."""

    momentum: Annotated[float, Between(0, 1)] = field(
        default=0.2,
        metadata={
            "symbol": "beta",
            "help": "share of the larger model's mean update in that of a smaller one's top block; 0: none",
        },
    )


def load(parameters: InclusiveFLParameters, *, rungs: Sequence[str]) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.inclusivefl import method

    return method(parameters, rungs=rungs)


CARD = Card(
    name="inclusivefl",
    paper="Liu et al., KDD 2022, arXiv:2202.08036",
    parameters=InclusiveFLParameters,
    load=load,
    exchange=lambda parameters: Exchange(down="slice of model", up="slice of model"),
    slicing=lambda parameters: Slicing(kinds=("depth", "layers"), instead="widths are heterofl's", separable=False),
    refuses=NOT_IN_GROUPS,
    sized=True,
    as_plain=True,
)
