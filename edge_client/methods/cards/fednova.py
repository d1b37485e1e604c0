"""The card of FedNova."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_client.methods.card import Card
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FedNovaParameters:
    """FedNova has none of its own: tau_i are the steps that a device made, rho is the run's `train.momentum`."""


def load(parameters: FedNovaParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fednova import method

    return method(parameters)


CARD = Card(
    name="fednova",
    paper="Wang et al., NeurIPS 2020, arXiv:2007.07481",
    parameters=FedNovaParameters,
    load=load,
    refuses=NOT_IN_GROUPS,
    as_plain=True,
)
