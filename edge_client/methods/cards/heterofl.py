"""The card of HeteroFL."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_client.methods.card import Card
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.methods.slices import Slicing, Turn

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class HeteroFLParameters:
    """Parameters of HeteroFL."""

    scaler: bool = field(
        default=True,
        metadata={
            "symbol": "1/r",
            "help": "divide what layers put out by their share r of the channels while training, in a model without "
            "normalisation: with one the factor has no effect",
        },
    )
    mask: bool = field(
        default=False,
        metadata={
            "symbol": "masked cross-entropy",
            "help": "logits of classes that a device has not are 0 in its loss, and it has no say in their rows of the "
            "output layer; tells the server which classes a device has, unless its owner says share.class-statistics = "
            "false: that one has no mask",
        },
    )
    redraw: bool = field(
        default=False,
        metadata={
            "symbol": "dynamic",
            "help": "each device draws one of the slices that it has memory for in every round; false: the largest",
        },
    )
    uniform: bool = field(
        default=True,
        metadata={"symbol": "1/m", "help": "all devices count the same; false: by their samples, as in FedAvg"},
    )


WIDTHS = ("full", "width:1/2", "width:1/4", "width:1/8", "width:1/16")
FOR_OTHER_SLICES = "layer-wise sharing of other slices is fedavg's"


def _drawn(architecture: str, turn: Turn) -> str:
    """One of the architectures that are not larger than the device's, drawn anew in every round."""
    smaller = turn.rungs[turn.rungs.index(architecture) :]
    return smaller[turn.seed % len(smaller)]


def _slicing(parameters: HeteroFLParameters) -> Slicing:
    slicing = Slicing(ladder=WIDTHS, kinds=("width",), instead=FOR_OTHER_SLICES)
    return dataclasses.replace(slicing, turn=_drawn) if parameters.redraw else slicing


def load(parameters: HeteroFLParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.heterofl import method

    return method(parameters)


CARD = Card(
    name="heterofl",
    paper="Diao et al., ICLR 2021, arXiv:2010.01264",
    parameters=HeteroFLParameters,
    load=load,
    slicing=_slicing,
    refuses=NOT_IN_GROUPS,
)
