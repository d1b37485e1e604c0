"""The card of training alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_client.methods.card import Card, Exchange
from edge_client.methods.cards.fedepth import NOT_IN_GROUPS

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParameters:
    """Training alone has none."""


def load(parameters: LocalParameters) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.local import method

    return method(parameters)


CARD = Card(
    name="local",
    paper="no federation",
    parameters=LocalParameters,
    load=load,
    exchange=lambda parameters: Exchange(
        down="nothing (the first model, once)", up="nothing", device="model and the state of its optimizer"
    ),
    has_global_model=lambda parameters: False,
    shares_weights=False,
    refuses=NOT_IN_GROUPS | {"inco": "it shares nothing that could be changed"},
)
