"""The card of FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_client.methods.card import Card

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgParameters:
    """FedAvg has none of its own: batch, epochs and learning rate (B, E, eta) belong to the run's `train`."""


def load(parameters: FedAvgParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.fedavg import method

    return method(parameters)


CARD = Card(
    name="fedavg",
    paper="McMahan et al., AISTATS 2017, arXiv:1602.05629",
    parameters=FedAvgParameters,
    load=load,
)
