"""The card of m-FeDepth."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards import fedepth
from edge_client.methods.cards.fedepth import FeDepthParameters
from edge_client.records import PlanRules

if TYPE_CHECKING:
    from edge_client.methods.base import Method


def _exchange(parameters: FeDepthParameters) -> Exchange:
    return Exchange(
        down="model, auxiliary heads",
        up="what was trained of model, auxiliary heads",
        device="weights of its other models and their heads, if mutual is above 1",
    )


def _plans(parameters: FeDepthParameters) -> PlanRules:
    return replace(fedepth.plans(parameters), auxiliary=True)


def load(parameters: FeDepthParameters, base: Method) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fedepth import method

    return method(parameters, base, auxiliary=True)


CARD = Card(
    name="m-fedepth",
    paper="Zhang et al., arXiv:2303.04887",
    parameters=FeDepthParameters,
    load=load,
    over=True,
    exchange=_exchange,
    plans=_plans,
    slicing=fedepth.slicing,
)
