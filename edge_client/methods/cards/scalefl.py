"""The card of ScaleFL."""

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
class ScaleFLParameters:
    """Parameters of ScaleFL."""

    gamma: Annotated[float, Between(0, 1000)] = field(
        default=0.0,
        metadata={
            "symbol": "gamma",
            "help": "weight of the distillation from a device's last exit to its earlier ones; 0, as in the authors' "
            "code by default: none",
        },
    )
    temperature: Annotated[float, Between(0.001, 1000)] = field(
        default=3.0, metadata={"symbol": "tau", "help": "divides the logits in the distillation"}
    )
    warm_up: Annotated[float, Between(0, 1)] = field(
        default=0.25, metadata={"symbol": "0.25 T", "help": "part of the run's rounds before the distillation begins"}
    )
    uniform: bool = field(
        default=True,
        metadata={"symbol": "1/m", "help": "all devices count the same; false: by their samples, as in FedAvg"},
    )


def load(parameters: ScaleFLParameters, *, rungs: Sequence[str]) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.scalefl import method

    return method(parameters, rungs=rungs)


CARD = Card(
    name="scalefl",
    paper="Ilhan et al., CVPR 2023",
    parameters=ScaleFLParameters,
    load=load,
    exchange=lambda parameters: Exchange(down="slice of model, its early exits", up="slice of model, its early exits"),
    slicing=lambda parameters: Slicing(
        kinds=("exit", "width"), instead="depth and layers are inclusivefl's", separable=False
    ),
    refuses=NOT_IN_GROUPS,
    sized=True,
)
