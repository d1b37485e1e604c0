"""The card of SplitMix."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.methods.slices import Slicing, Turn
from edge_client.models.slicing import parse
from edge_client.records import Between, PlanRules

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMixParameters:
    """Parameters of SplitMix."""

    bases: Annotated[int, Between(1, 64)] = field(
        default=8,
        metadata={
            "symbol": "1/r",
            "help": "base networks that the model is split into, each with that share of the channels; 1 is FedAvg",
        },
    )


_MOST_DRAWS = 10**6


def bases_of(num_bases: int, slice_name: str) -> list[int]:
    """The numbers of the base networks of a slice."""
    spec = parse(slice_name)
    first, seed = spec.offset % num_bases, spec.offset // num_bases
    others = [number for number in range(num_bases) if number != first]
    random.Random(seed).shuffle(others)
    return [first, *others[: math.floor(spec.width * num_bases) - 1]]


def _draw_bases(num_bases: int, architecture: str, turn: Turn) -> str:
    """As many of the model's base networks as the width holds: the first goes round, the others are drawn.

    Which ones stands in the place of the first channel; `bases_of` reads it.
    """
    spec = parse(architecture)
    first = (zlib.crc32(turn.device.encode()) + turn.round) % num_bases
    return str(replace(spec, offset=first + num_bases * (turn.seed % _MOST_DRAWS))) if spec.width < 1 else architecture


def _slicing(parameters: SplitMixParameters) -> Slicing:
    ladder = tuple(f"width:1/{n}" if n > 1 else "full" for n in (1, 2, 4, 8, 16, 32, 64) if n <= parameters.bases)
    return Slicing(
        ladder=ladder,
        kinds=("width",),
        instead="a base network has all blocks",
        turn=partial(_draw_bases, parameters.bases),
        separable=False,
        split=parameters.bases > 1,
    )


def _plans(parameters: SplitMixParameters) -> PlanRules:
    """Weights, gradients and an optimizer's state of the other bases, of a device that has all of them."""
    return PlanRules(weight_copies=3 * (parameters.bases - 1))


def load(parameters: SplitMixParameters, *, rungs: Sequence[str]) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.splitmix import method

    return method(parameters, rungs=rungs)


CARD = Card(
    name="splitmix",
    paper="Hong et al., ICLR 2022, arXiv:2203.09747",
    parameters=SplitMixParameters,
    load=load,
    exchange=lambda parameters: Exchange(down="some bases of model", up="the same bases"),
    plans=_plans,
    slicing=_slicing,
    refuses=NOT_IN_GROUPS | {"inco": "its bases have no layers in common"},
    sized=True,
)
