"""What a run needs to know of its method, by the method's name and parameters, or by the run file. Free of torch.

`get` and `of_run` alone load the method itself. What is not said otherwise raises as `validate` does.
Does not cover: how a name is read (`combination`), what each method says (`methods.cards`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from edge_client.config.run_file import RunFile
from edge_client.errors import InputError, NoSuchNameError
from edge_client.knowledge.schema import MIN_COUNT_FLOOR, KnowledgeRules, Limits
from edge_client.methods.base import Exchange, Method, PlanRules
from edge_client.methods.card import any_slice
from edge_client.methods.combination import Part, decides_plans, names, parts_of, with_parameters
from edge_client.methods.discovery import PLAIN, built_in
from edge_client.methods.slices import WHOLE_MODEL, Slicing
from edge_client.models import registry as models
from edge_client.models.slicing import SliceSpec
from edge_client.models.slicing import parse as parse_slice

__all__ = [
    "architectures",
    "exchange",
    "get",
    "has_global_model",
    "knowledge",
    "knowledge_limits",
    "mixes_widths",
    "named",
    "names",
    "of_run",
    "paper",
    "parameter_types",
    "plan_rules",
    "sharing",
    "slicing",
    "trains_as",
    "usual_model",
    "validate",
]


# by name


def validate(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise `NoSuchNameError` for an unknown method, `InputError` for a parameter it does not have or cannot use."""
    with_parameters(name, parameters)


def paper(name: str) -> str:
    """Where a method was published; of several over one another, the papers of all but plain FedAvg."""
    parts = parts_of(name)
    return "; ".join(card.paper for part, card in parts if card.paper and (part != PLAIN or len(parts) == 1))


def exchange(name: str, parameters: Mapping[str, Any]) -> Exchange:
    """What travels in a round, in words: the first part of a name that says something knows."""
    parts = with_parameters(name, parameters)
    return next((part.card.exchange(part.parameters) for part in parts if part.card.exchange), Exchange())


def parameter_types(name: str) -> list[type]:
    """The dataclasses of a method's parameters, one for each part of its name."""
    return [card.parameters for _, card in parts_of(name)]


def plan_rules(name: str, parameters: Mapping[str, Any]) -> PlanRules:
    """What a planner may choose for the devices of a run."""
    parts = with_parameters(name, parameters)
    rules = [part.card.plans(part.parameters) for part in parts]
    deciding = next((number for number, part in enumerate(parts) if decides_plans(part.card)), 0)
    return dataclasses.replace(
        rules[deciding],  # says how a device trains; what other parts keep and make comes on top
        weight_copies=sum(part.weight_copies for part in rules),
        step_copies=max(part.step_copies for part in rules),
        fixed_bytes=sum(part.fixed_bytes for part in rules),
        again=max(part.again for part in rules),
        separate_gradients=any(part.separate_gradients for part in rules),
        optimizers=max(part.optimizers for part in rules),
        recomputes=all(part.recomputes for part in rules),
    )


def slicing(name: str, parameters: Mapping[str, Any]) -> Slicing:
    """What the method says about slices: the first part of its name that says something."""
    parts = with_parameters(name, parameters)
    part = next((part for part in parts if part.card.slicing is not any_slice), parts[-1])
    rules = part.card.slicing(part.parameters)
    if any(part.card.over for part in parts):  # which combine the layers of one model
        rules = dataclasses.replace(rules, kinds=tuple(kind for kind in rules.kinds if kind != "model"))
    return rules


def knowledge(name: str, parameters: Mapping[str, Any]) -> KnowledgeRules | None:
    """What devices of a run send beside weights; None: nothing."""
    parts = with_parameters(name, parameters)
    return next((part.card.knowledge(part.parameters) for part in parts if part.card.knowledge), None)


def has_global_model(name: str, parameters: Mapping[str, Any]) -> bool:
    """Whether the server's model is one to use and to judge; otherwise the models live on the devices."""
    return all(part.card.has_global_model(part.parameters) for part in with_parameters(name, parameters))


def trains_as(name: str) -> str:
    """The method whose devices do the same, so that their memory need not be measured twice."""
    return "+".join(part for part, card in parts_of(name) if not card.as_plain) or PLAIN


def usual_model(name: str) -> str:
    """A model to show the method with."""
    usual = built_in()[PLAIN].shown_with
    shown_with = [card.shown_with for _, card in parts_of(name)]
    return next((model for model in shown_with if model != usual), shown_with[0])


# by run


def sharing(run: RunFile) -> str:
    """`position` or `architecture`: what the run says, or its method does."""
    if run.sharing != "auto":
        return run.sharing
    if any(named(run, text).model for text in run.slices):
        return "architecture"
    return slicing(run.method.name, run.method.parameters).sharing


def named(run: RunFile, text: str) -> SliceSpec:
    """The slice that a text means in a run, also by a model's name; raises `InputError` and `NoSuchNameError`."""
    if text in run.models:
        return SliceSpec(model=text)
    name = run.model.name if run.model is not None else ""
    spec = models.parse_slice(name, text, others=True)
    if spec.model and spec.model not in run.models and spec.model not in models.names():
        raise NoSuchNameError.of("model", spec.model, [*run.models, *models.names()])
    return spec


def architectures(run: RunFile) -> tuple[str, ...]:
    """The slices that devices of a run may train, the largest first; raises `InputError`."""
    method = run.method.name
    rules, specs = slicing(method, run.method.parameters), [named(run, text) for text in run.slices]
    slices = rules.architectures([str(spec) for spec in specs], method)
    other_models = [spec.model for spec in specs if spec.model]
    if other_models and run.sharing == "position":
        raise InputError(
            f'sharing: "position" combines the parts of one model, and slices names the other model '
            f"{other_models[0]!r}; leave sharing out: each architecture is then a model of its own"
        )
    if sharing(run) == "architecture" and not rules.separable:
        raise InputError(
            f'sharing: {method!r} combines the slices of one model, got "architecture"; leave it out, '
            "or use fedavg, which trains each architecture by itself"
        )
    return slices


def mixes_widths(run: RunFile) -> bool:
    """Whether devices of a run train slices of different width in shared tensors; raises as `architectures` does."""
    combined = all(card.shares_weights for _, card in parts_of(run.method.name))
    separate = sharing(run) == "architecture" or slicing(run.method.name, run.method.parameters).split
    return combined and not separate and len({parse_slice(slice_name).width for slice_name in architectures(run)}) > 1


def knowledge_limits(run: RunFile) -> Limits:
    """What a device of a run may send beside weights, at most."""
    rules = knowledge(run.method.name, run.method.parameters) or KnowledgeRules(kinds=(), max_bytes=0)
    return Limits(
        num_classes=len(run.classes),
        max_rows=rules.max_rows,
        max_bytes=rules.max_bytes,
        kinds=rules.kinds,
        min_count=MIN_COUNT_FLOOR,
        max_count=run.devices.max_samples * run.train.most_epochs,
    )


# the method itself: imports torch


def of_run(run: RunFile) -> Method:
    """The method of a run; raises as `validate` and `architectures` do."""
    slices = architectures(run)
    if sharing(run) == "architecture":
        slices = (WHOLE_MODEL,)  # each slice is a model of its own, and knows of no other
    return get(run.method.name, run.method.parameters, slices)


def get(name: str, parameters: Mapping[str, Any], architectures: Sequence[str] = ()) -> Method:
    """The method with its parameters set, for these slices or its own."""
    slices = tuple(architectures) or slicing(name, parameters).ladder
    parts = with_parameters(name, parameters)
    if parts[-1].card.over:
        parts += with_parameters(PLAIN, {})
    *over, under = parts
    method = _load(under, slices)
    for part in reversed(over):
        method = _load(part, slices, method)
    return dataclasses.replace(
        method,
        name=name,
        paper=paper(name) or method.paper,
        parameters=parts[0].parameters,
        exchange=exchange(name, parameters),
        plans=plan_rules(name, parameters),
    )


def _load(part: Part, slices: Sequence[str], *base: Method) -> Method:
    if part.card.sized:
        return part.card.load(part.parameters, *base, rungs=slices)
    return part.card.load(part.parameters, *base)
