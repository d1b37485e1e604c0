"""The methods by name. Names and parameters are checked without torch; `get` loads the method itself.

A name may put methods over another: `fedepth+fedprox` is FeDepth whose devices minimise what FedProx tells. The last
part is the method underneath; those before it say in the registry that they can be put over one. Their parameters stand
in one table.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.errors import InputError, NoSuchNameError
from edge_client.files import parse_table
from edge_client.methods.base import Method, PlanRules
from edge_client.methods.parameters import FedAvgParameters, FeDepthParameters, FedProxParameters

__all__ = ["get", "names", "plan_rules", "validate"]


def _fedavg(parameters: FedAvgParameters) -> Method:
    from edge_client.methods import fedavg

    return fedavg.method(parameters)


def _fedprox(parameters: FedProxParameters) -> Method:
    from edge_client.methods import fedprox

    return fedprox.method(parameters)


def _fedepth(parameters: FeDepthParameters, base: Method) -> Method:
    from edge_client.methods import fedepth

    return fedepth.method(parameters, base)


def _m_fedepth(parameters: FeDepthParameters, base: Method) -> Method:
    from edge_client.methods import fedepth

    return fedepth.method(parameters, base, auxiliary=True)


def _fedepth_plans(parameters: FeDepthParameters) -> PlanRules:
    return PlanRules(
        groups=True,
        partial=parameters.partial,
        max_models=parameters.mutual,
        masked=parameters.averaging == "masked",
        cost=parameters.cost,
    )


def _m_fedepth_plans(parameters: FeDepthParameters) -> PlanRules:
    return dataclasses.replace(_fedepth_plans(parameters), auxiliary=True)


def _no_choice(parameters: Any) -> PlanRules:
    return PlanRules()


@dataclass(frozen=True, slots=True)
class _Entry:
    """`load` imports torch, hence not at the top; with `over`, it also takes the method that this one is put over."""

    parameters: type
    load: Callable[..., Method]
    over: bool = False
    plans: Callable[[Any], PlanRules] = _no_choice


_METHODS = {
    "fedavg": _Entry(FedAvgParameters, _fedavg),
    "fedprox": _Entry(FedProxParameters, _fedprox),
    "fedepth": _Entry(FeDepthParameters, _fedepth, over=True, plans=_fedepth_plans),
    "m-fedepth": _Entry(FeDepthParameters, _m_fedepth, over=True, plans=_m_fedepth_plans),
}
_PLAIN = "fedavg"  # what a method is put over that names none


def names() -> list[str]:
    """All methods and all pairs of them, sorted."""
    over = [name for name, entry in _METHODS.items() if entry.over]
    under = [name for name, entry in _METHODS.items() if not entry.over and name != _PLAIN]
    return sorted([*_METHODS, *(f"{name}+{base}" for name in over for base in under)])


def validate(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise `NoSuchNameError` for an unknown method, `InputError` for a parameter it does not have or cannot use."""
    _parse(name, parameters)


def plan_rules(name: str, parameters: Mapping[str, Any]) -> PlanRules:
    """What a planner may choose for the devices of a run; raises as `validate` does. Free of torch."""
    rules = [_METHODS[part].plans(parsed) for part, parsed in _parse(name, parameters)]
    return next((rule for rule in rules if rule != PlanRules()), PlanRules())


def get(name: str, parameters: Mapping[str, Any]) -> Method:
    """The method with its parameters set; raises as `validate` does."""
    parts = _parse(name, parameters)
    if _METHODS[parts[-1][0]].over:
        parts = [*parts, (_PLAIN, FedAvgParameters())]
    *over, (under, parsed) = parts
    method = _METHODS[under].load(parsed)
    for part, parsed in reversed(over):
        method = _METHODS[part].load(parsed, method)
    return dataclasses.replace(method, name=name, plans=plan_rules(name, parameters))


def _parse(name: str, parameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Each part of the name with its parameters."""
    parts = _parts(name)
    fields = {f.name: f for part in parts for f in dataclasses.fields(_METHODS[part].parameters)}
    record = _merged([_METHODS[part].parameters for part in parts])
    for key, value in parameters.items():
        if not fields:
            raise InputError(f"method {name!r} has no parameters of its own, got {key} = {value!r}; remove it")
        try:
            parse_table(record, {key: value}, source=f"method {name!r}")
        except InputError as error:
            about = fields.get(key.replace("-", "_"))
            if about is None:
                raise
            told = str(error).removesuffix(f" ({about.metadata['help']})")
            raise InputError(f"{told}; {about.metadata['symbol']} in the paper: {about.metadata['help']}") from None
    parsed: Any = parse_table(record, parameters, source=f"method {name!r}")
    return [(part, _own(_METHODS[part].parameters, parsed)) for part in parts]


def _parts(name: str) -> list[str]:
    """`fedepth+fedprox` as its parts, if they can be put over one another."""
    parts = name.split("+")
    if any(part not in _METHODS for part in parts):
        raise NoSuchNameError.of("method", name, names())
    for part in parts[:-1]:
        if not _METHODS[part].over:
            able = ", ".join(sorted(known for known, entry in _METHODS.items() if entry.over))
            raise InputError(f"method {name!r}: {part!r} cannot be put over another; {able} can")
    choosing = [part for part in parts if _METHODS[part].plans is not _no_choice]
    if len(set(parts)) != len(parts) or len(choosing) > 1:
        raise InputError(f"method {name!r}: expected each part once and one of {_choosing()} at most; leave one out")
    return parts


def _choosing() -> str:
    return ", ".join(sorted(name for name, entry in _METHODS.items() if entry.plans is not _no_choice))


def _merged(classes: Sequence[type]) -> type:
    """One record with the parameters of all parts; no two methods may call one by the same name."""
    if len(classes) == 1:
        return classes[0]
    merged: list[tuple[str, Any, Any]] = []
    for cls in classes:
        hints = typing.get_type_hints(cls, include_extras=True)
        for f in dataclasses.fields(cls):
            merged.append((f.name, hints[f.name], dataclasses.field(default=f.default, metadata=f.metadata)))
    return dataclasses.make_dataclass("Parameters", merged, frozen=True, kw_only=True)


def _own(cls: type, parsed: Any) -> Any:
    return cls(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(cls)})
