"""The cards of the built-in methods: every module of `methods.cards` brings one."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from edge_client.methods import cards
from edge_client.methods.card import Card

__all__ = ["PLAIN", "built_in"]

PLAIN = "fedavg"  # the method underneath where a name has none


@cache
def built_in() -> Mapping[str, Card]:
    """The cards by the names of their methods; raises `TypeError` for a module without one, or with another's name."""
    by_name: dict[str, Card] = {}
    for module in pkgutil.iter_modules(cards.__path__):
        path = f"{cards.__name__}.{module.name}"
        card = getattr(import_module(path), "CARD", None)
        if not isinstance(card, Card) or card.name.replace("-", "_") != module.name:
            raise TypeError(
                f"{path}: expected CARD, the Card of a method with the name of its module, got {card!r:.80}"
            )
        by_name[card.name] = card
    return by_name
