"""What the registry knows of a method beside the method itself: enough to check and plan a run without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_client.knowledge.schema import KnowledgeRules
from edge_client.methods.base import Method, PlanRules
from edge_client.methods.slices import Slicing

__all__ = ["Entry", "any_slice", "no_choice"]


def no_choice(parameters: Any) -> PlanRules:
    """Most methods keep nothing while they train, and leave the rest to the planner."""
    return PlanRules()


def any_slice(parameters: Any) -> Slicing:
    """Most methods train the whole model, or the slices that a run names."""
    return Slicing()


def _global_model(parameters: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Entry:
    """`load` makes the method of its parameters, and imports torch; with `over`, it also takes the method underneath.

    All other functions take the parameters, too.
    """

    parameters: type
    load: Callable[..., Method]
    over: bool = False
    plans: Callable[[Any], PlanRules] = no_choice
    refuses: Mapping[str, str] = field(default_factory=dict)  # method that this one cannot be under -> why
    has_global_model: Callable[[Any], bool] = _global_model
    shares_weights: bool = True  # the server makes one model of those of several devices, or a part of one
    knowledge: Callable[[Any], KnowledgeRules] | None = None  # what devices send beside weights, or instead
    slicing: Callable[[Any], Slicing] = any_slice  # of a method over another that says nothing: that one's
    sized: bool = False  # `load` also takes the slices of the run
    shown_with: str = "small-cnn"  # a model that it can train
    as_plain: bool = False  # its devices train as FedAvg's do, or as those of the method underneath
