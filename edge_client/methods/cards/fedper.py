"""The card of FedPer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.records import Between, Matches

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FedPerParameters:
    """Parameters of FedPer."""

    personal: Annotated[int, Between(0, 1000)] = field(
        default=1,
        metadata={"symbol": "K_P", "help": "last units with parameters that never leave a device; 0 is FedAvg"},
    )
    match: Annotated[str, Matches("prefix|name_shape")] = field(
        default="prefix",
        metadata={
            "symbol": "K_B",
            "help": "what slices of different sizes share: prefix: their first units, as long as they are the same; "
            "name_shape: every tensor that has one name and shape",
        },
    )


def load(parameters: FedPerParameters, *, rungs: Sequence[str]) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fedper import method

    return method(parameters, rungs=rungs)


CARD = Card(
    name="fedper",
    paper="Arivazhagan et al., arXiv:1912.00818",
    parameters=FedPerParameters,
    load=load,
    exchange=lambda parameters: Exchange(
        down="model (personal layers as the server first made them)",
        up="model without personal layers",
        device="personal layers and the state of their optimizer",
    ),
    has_global_model=lambda parameters: parameters.personal == 0,
    refuses=NOT_IN_GROUPS,
    sized=True,
)
