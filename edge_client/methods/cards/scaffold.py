"""The card of Scaffold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS
from edge_client.records import PlanRules

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldParameters:
    """Parameters of Scaffold."""

    correction: bool = field(
        default=True,
        metadata={"symbol": "c - c_i", "help": "correct each local step by the control variates; false is FedAvg"},
    )


def _exchange(parameters: ScaffoldParameters) -> Exchange:
    if not parameters.correction:
        return Exchange()
    return Exchange(down="model, control variate c", up="model, c + delta c_i", device="control variate c_i")


def _plans(parameters: ScaffoldParameters) -> PlanRules:
    """The received weights and the correction."""
    return PlanRules(weight_copies=2) if parameters.correction else PlanRules()


def load(parameters: ScaffoldParameters, *, rungs: Sequence[str]) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.scaffold import method

    return method(parameters, rungs=rungs)


CARD = Card(
    name="scaffold",
    paper="Karimireddy et al., ICML 2020, arXiv:1910.06378",
    parameters=ScaffoldParameters,
    load=load,
    exchange=_exchange,
    plans=_plans,
    refuses=NOT_IN_GROUPS,
    sized=True,
)
