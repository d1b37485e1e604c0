"""A method's name may put methods over another: `fedepth+fedprox` is FeDepth whose devices minimise what FedProx says.

The last part is the method underneath; those before it say on their cards that they can be put over one, and a method
may refuse to be under another. The parameters of all parts stand in one table. Free of torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from edge_client.config.key_descriptions import describe
from edge_client.config.tables import parse_table
from edge_client.errors import InputError, NoSuchNameError
from edge_client.methods import user_methods
from edge_client.methods.card import Card, no_plan_rules
from edge_client.methods.discovery import PLAIN, built_in

__all__ = ["Part", "decides_plans", "names", "parts_of", "with_parameters"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A method of a name, with its parameters."""

    name: str
    card: Card
    parameters: Any  # of the card's dataclass


def names() -> list[str]:
    """All built-in methods and all pairs of them, sorted."""
    cards = built_in()
    pairs = (
        f"{upper}+{lower}"
        for upper, card in cards.items()
        for lower, below in cards.items()
        if card.over and not below.over and lower != PLAIN and upper not in below.refuses
    )
    return sorted([*cards, *pairs])


def parts_of(name: str) -> list[tuple[str, Card]]:
    """The methods of a name; raises `NoSuchNameError`, and `InputError` if they cannot be put over one another."""
    cards = [(part, built_in().get(part) or user_methods.find(part)) for part in name.split("+")]
    parts = [(part, card) for part, card in cards if card is not None]
    if len(parts) < len(cards):
        raise NoSuchNameError.of("method", name, names())
    for part, card in parts[:-1]:
        if not card.over:
            able = ", ".join(sorted(other for other, known in built_in().items() if known.over))
            raise InputError(f"method {name!r}: {part!r} cannot be put over another; {able} can")
    if len({part for part, _ in parts}) != len(parts) or sum(decides_plans(card) for _, card in parts) > 1:
        deciding = ", ".join(sorted(other for other, card in built_in().items() if decides_plans(card)))
        raise InputError(f"method {name!r}: expected each part once and one of {deciding} at most; leave one out")
    for number, (part, card) in enumerate(parts):
        for above, _ in parts[:number]:
            if above in card.refuses:
                why = card.refuses[above]
                raise InputError(f"method {name!r}: {part!r} cannot be under {above!r}: {why}; use one of them alone")
    return parts


def decides_plans(card: Card) -> bool:
    """Whether a method says how the devices of a run train, whatever is under it."""
    return card.over and card.plans is not no_plan_rules


def with_parameters(name: str, parameters: Mapping[str, Any]) -> list[Part]:
    """The methods of a name with their parameters; raises as `parts_of`, and `InputError` for a parameter."""
    parts = parts_of(name)
    types = [card.parameters for _, card in parts]
    merged = _merged(types)
    table = {key.replace("_", "-"): value for key, value in parameters.items()}  # as they stand in files
    for key, value in table.items():
        _check_parameter(name, merged, key, value)
    values: Any = parse_table(merged, table, source=f"method {name!r}")
    return [Part(name=part, card=card, parameters=_pick(card.parameters, values)) for part, card in parts]


def _merged(types: Sequence[type]) -> type:
    """One record with the parameters of all parts; no two methods may call one by the same name."""
    if len(types) == 1:
        return types[0]
    fields: list[tuple[str, Any, Any]] = []
    for cls in types:
        hints = typing.get_type_hints(cls, include_extras=True)
        for f in dataclasses.fields(cls):
            fields.append((f.name, hints[f.name], dataclasses.field(default=f.default, metadata=f.metadata)))
    return dataclasses.make_dataclass("Parameters", fields, frozen=True, kw_only=True)


def _pick(cls: type, values: Any) -> Any:
    """The parameters of one part."""
    return cls(**{f.name: getattr(values, f.name) for f in dataclasses.fields(cls)})


def _check_parameter(name: str, merged: type, key: str, value: Any) -> None:
    """Raise an `InputError` that also tells what the parameter is in the paper."""
    fields = {f.name: f for f in dataclasses.fields(merged)}
    if not fields:
        raise InputError(f"method {name!r} has no parameters of its own, got {key} = {value!r}; remove it")
    try:
        parse_table(merged, {key: value}, source=f"method {name!r}")
    except InputError as error:
        field = fields.get(key.replace("-", "_"))
        if field is None:
            raise
        if not field.metadata:  # of a user's method, which is in no paper yet
            raise InputError(str(error).removesuffix(" ()")) from None
        message = str(error).removesuffix(f" ({field.metadata['help']})")
        if message.endswith(f"got {type(value).__name__}"):  # of another type
            message += f" {value!r:.40}{_range(merged, key)}"
        symbol = f"{field.metadata['symbol']} in the paper: " if field.metadata["symbol"] != "-" else ""
        raise InputError(f"{message}; {symbol}{field.metadata['help']}") from None


def _range(merged: type, key: str) -> str:
    limits = next(row.range for row in describe(merged) if row.key.replace("-", "_") == key.replace("-", "_"))
    return f" (range: {limits.replace('`', '')})" if limits else ""
