"""The card of a method: what a coordinator and a planner must know of it, without torch.

A built-in method has its card in `methods.cards`, in a module of its own that calls it `CARD`; a user's method for
simulations is a card, too (`user_methods`). Does not cover: what the method does (`base.Method`, which `load` makes),
how a run combines methods (`combination`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_client.knowledge.schema import KnowledgeRules
from edge_client.methods.base import Exchange, Method
from edge_client.methods.slices import Slicing
from edge_client.records import PlanRules

__all__ = ["Card", "Exchange", "any_slice", "no_plan_rules"]


def no_plan_rules(parameters: Any) -> PlanRules:
    """Most methods keep nothing while they train, and leave the rest to the planner."""
    return PlanRules()


def any_slice(parameters: Any) -> Slicing:
    """Most methods train the whole model, or the slices that a run names."""
    return Slicing()


def _always(parameters: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A method, as the registry knows it. Every function takes the parameters: a `parameters` object.

    `load` makes the method, and may import torch. With `over`, it also takes the method underneath; with `sized`, the
    slices of the run, as `rungs`.
    """

    parameters: type = field(kw_only=False)  # a frozen dataclass; `symbol` and `help` in the metadata of its fields
    load: Callable[..., Method] = field(kw_only=False)
    name: str = ""  # as it stands in run files; a user's method is named by its file
    paper: str = ""
    exchange: Callable[[Any], Exchange] | None = None  # None: the model, or what the method underneath exchanges
    over: bool = False  # it can be put over another method
    refuses: Mapping[str, str] = field(default_factory=dict)  # method that this one cannot be under -> why
    plans: Callable[[Any], PlanRules] = no_plan_rules
    slicing: Callable[[Any], Slicing] = any_slice  # a method over another that says nothing leaves it to that one
    sized: bool = False
    knowledge: Callable[[Any], KnowledgeRules] | None = None  # what devices send beside weights, or instead
    has_global_model: Callable[[Any], bool] = _always  # the server has a model to use and to judge
    shares_weights: bool = True  # the server makes one model of those of several devices, or a part of one
    as_plain: bool = False  # its devices train as FedAvg's do, or as those of the method underneath
    shown_with: str = "small-cnn"  # a model that it can train
