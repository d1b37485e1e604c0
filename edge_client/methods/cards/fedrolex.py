"""The card of FedRolex."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from edge_client.methods.card import Card
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.methods.cards.heterofl import FOR_OTHER_SLICES, WIDTHS
from edge_client.methods.slices import Slicing, Turn
from edge_client.models.slicing import parse

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FedRolexParameters:
    """Parameters of FedRolex."""

    roll: bool = field(
        default=True,
        metadata={
            "symbol": "n mod K",
            "help": "the window of channels moves by one in every round; false: it stays, which is HeteroFL's",
        },
    )
    uniform: bool = field(
        default=True,
        metadata={"symbol": "p_n", "help": "all devices count the same; false: by their samples, as in FedAvg"},
    )


def _rolled(architecture: str, turn: Turn) -> str:
    """As many channels, from one further on in every round; the first round begins at the first channel."""
    spec = parse(architecture)
    return str(replace(spec, offset=turn.round - 1)) if spec.width < 1 else architecture


def _slicing(parameters: FedRolexParameters) -> Slicing:
    slicing = Slicing(ladder=WIDTHS, kinds=("width",), instead=FOR_OTHER_SLICES)
    return replace(slicing, turn=_rolled) if parameters.roll else slicing


def load(parameters: FedRolexParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fedrolex import method

    return method(parameters)


CARD = Card(
    name="fedrolex",
    paper="Alam et al., NeurIPS 2022, arXiv:2212.01548",
    parameters=FedRolexParameters,
    load=load,
    slicing=_slicing,
    refuses=NOT_IN_GROUPS,
    as_plain=True,
)
