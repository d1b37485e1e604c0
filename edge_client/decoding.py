"""Plain data to records, fast: each class is compiled once, to closures that know which types and limits to expect.

    decoder(Offer)(body)  ──> the record, or `MismatchError` without a word about what is wrong

A coordinator decodes a few messages per device and round, and looking at annotations anew took a fifth of its time.
What does not match is decoded a second time by `records.from_map`, field by field, which alone has the rules in words
and finds the message; both accept exactly the same data.

Covers: dataclasses with scalars, `Between`, `Matches`, tuples, maps, nested records, `X | None`.
Does not cover: reasons.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, Union

__all__ = ["Between", "Decoder", "Matches", "MismatchError", "RecordField", "decoder", "fields_of"]

R = TypeVar("R")
Decoder = Callable[[Any], Any]  # plain data -> checked value

_LARGEST = 1e300  # below it every int has a finite float


class MismatchError(Exception):
    """The data does not match the class."""


@dataclass(frozen=True, slots=True)
class Between:
    """Inclusive range of a number."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Matches:
    """Whole-string pattern of a text."""

    pattern: str


class RecordField(NamedTuple):
    """A field of a record, and its key in a map."""

    key: str  # in the map; the field's name, unless `records.later` gave it another one
    name: str
    annotation: Any
    required: bool
    later: bool  # earlier versions do not know it: left out while it has its default
    default: Any


@functools.cache
def fields_of(cls: Any) -> dict[str, RecordField]:
    """The fields of a record by their keys in a map."""
    hints = typing.get_type_hints(cls, include_extras=True)
    missing = dataclasses.MISSING
    fields = (
        RecordField(
            key=f.metadata.get("key") or f.name,
            name=f.name,
            annotation=hints[f.name],
            required=f.default is missing and f.default_factory is missing,
            later=bool(f.metadata.get("later")),
            default=f.default,
        )
        for f in dataclasses.fields(cls)
    )
    return {field.key: field for field in fields}


@functools.cache
def decoder(cls: Any) -> Decoder:
    """The compiled decoder of a dataclass; it raises `MismatchError`, or what the class itself raises."""
    fields = {key: (field.name, _compile(field.annotation)) for key, field in fields_of(cls).items()}

    def decode(data: Any) -> Any:
        if type(data) is not dict:
            raise MismatchError
        values = {}
        for key, value in data.items():
            field = fields.get(key)
            if field is not None:
                name, check = field
                values[name] = check(value)
            elif type(key) is not str or not key.startswith("x-"):
                raise MismatchError
        return cls(**values)  # a TypeError if a field is missing that has no default

    return decode


def _compile(annotation: Any) -> Decoder:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _limited(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return _optional([argument for argument in arguments if argument is not type(None)])
    if origin is tuple:
        return _tuple(arguments)
    if origin in (dict, Mapping):
        return _mapping(_compile(arguments[1]))
    if annotation is Any:
        return lambda value: value
    if dataclasses.is_dataclass(annotation):
        nested: Any = annotation
        return lambda value: decoder(nested)(value)  # compiled when it is needed: a class may hold itself
    return _float if annotation is float else _exactly(annotation)


def _exactly(kind: type) -> Decoder:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise MismatchError
        return value

    return check


def _float(value: Any) -> float:
    if type(value) is float:
        if -_LARGEST < value < _LARGEST:  # so it is no NaN either
            return value
    elif type(value) is int and -_LARGEST < value < _LARGEST:
        return float(value)
    raise MismatchError


def _limited(base: Any, limits: tuple[object, ...]) -> Decoder:
    match base, limits:
        case type() as kind, (Between(low, high),) if kind is int:
            return _int_between(low, high)
        case type() as kind, (Matches(pattern),) if kind is str:
            return _text(pattern)
    checks = [_limit(limit) for limit in limits if isinstance(limit, (Between, Matches))]
    inner = _compile(base)

    def check(value: Any) -> Any:
        checked = inner(value)
        if not all(is_inside(checked) for is_inside in checks):
            raise MismatchError
        return checked

    return check


def _limit(limit: Between | Matches) -> Callable[[Any], bool]:
    if isinstance(limit, Matches):
        fullmatch = re.compile(limit.pattern).fullmatch
        return lambda value: fullmatch(value) is not None
    low, high = limit.low, limit.high
    return lambda value: bool(low <= value <= high)


def _int_between(low: float, high: float) -> Decoder:
    def check(value: Any) -> Any:
        if type(value) is int and low <= value <= high:
            return value
        raise MismatchError

    return check


def _text(pattern: str) -> Decoder:
    fullmatch = re.compile(pattern).fullmatch

    def check(value: Any) -> Any:
        if type(value) is str and fullmatch(value) is not None:
            return value
        raise MismatchError

    return check


def _optional(choices: list[Any]) -> Decoder:
    if len(choices) != 1:
        raise TypeError(f"expected one type or None, got {choices}")
    inner = _compile(choices[0])
    return lambda value: None if value is None else inner(value)


def _tuple(items: tuple[Any, ...]) -> Decoder:
    if len(items) == 2 and items[1] is Ellipsis:
        each = _compile(items[0])

        def check_all(value: Any) -> Any:
            if not isinstance(value, (list, tuple)):
                raise MismatchError
            return tuple([each(item) for item in value])

        return check_all
    inner = [_compile(item) for item in items]

    def check_one_by_one(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(inner):
            raise MismatchError
        return tuple([check(item) for check, item in zip(inner, value, strict=True)])

    return check_one_by_one


def _mapping(inner: Decoder) -> Decoder:
    def check(value: Any) -> Any:
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise MismatchError
        return {key: inner(item) for key, item in value.items()}

    return check
