"""The methods by name. Names and parameters are checked without torch; `get` loads the method itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edge_client.errors import InputError, NoSuchNameError
from edge_client.files import parse_table
from edge_client.methods.base import Method
from edge_client.methods.parameters import FedAvgParameters, FedProxParameters

__all__ = ["get", "names", "validate"]


def _fedavg(parameters: FedAvgParameters) -> Method:
    from edge_client.methods import fedavg

    return fedavg.method(parameters)


def _fedprox(parameters: FedProxParameters) -> Method:
    from edge_client.methods import fedprox

    return fedprox.method(parameters)


@dataclass(frozen=True, slots=True)
class _Entry:
    parameters: type
    load: Callable[[Any], Method]  # imports torch, hence not at the top


_METHODS = {
    "fedavg": _Entry(FedAvgParameters, _fedavg),
    "fedprox": _Entry(FedProxParameters, _fedprox),
}


def names() -> list[str]:
    """All methods, sorted."""
    return sorted(_METHODS)


def validate(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise `NoSuchNameError` for an unknown method, `InputError` for a parameter it does not have or cannot use."""
    _parse(name, parameters)


def get(name: str, parameters: Mapping[str, Any]) -> Method:
    """The method with its parameters set; raises as `validate` does."""
    parsed = _parse(name, parameters)
    return _METHODS[name].load(parsed)


def _parse(name: str, parameters: Mapping[str, Any]) -> Any:
    if name not in _METHODS:
        raise NoSuchNameError.of("method", name, names())
    cls = _METHODS[name].parameters
    fields = {f.name: f.metadata for f in dataclasses.fields(cls)}
    for key, value in parameters.items():
        if not fields:
            raise InputError(f"method {name!r} has no parameters of its own, got {key} = {value!r}; remove it")
        try:
            parse_table(cls, {key: value}, source=f"method {name!r}")
        except InputError as error:
            about = fields.get(key.replace("-", "_"))
            if about is None:
                raise
            told = str(error).removesuffix(f" ({about['help']})")
            raise InputError(f"{told}; {about['symbol']} in the paper: {about['help']}") from None
    return parse_table(cls, parameters, source=f"method {name!r}")
