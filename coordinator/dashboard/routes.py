"""What a path of the API means: its parameters and their ranges, who may ask, and the record of the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.dashboard.access import Viewer
from coordinator.dashboard.http import HttpError, HttpRequest

__all__ = ["PREFIX", "BodyField", "Call", "Param", "Route", "match", "parse_body", "parse_query"]

PREFIX = "/api/v1/"
_NAME = r"[A-Za-z0-9_.@-]{1,128}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A parameter of the query; a number has a range, a text a longest length."""

    name: str
    about: str
    low: int | None = None
    high: int | None = None
    default: int | str | None = None
    choices: tuple[str, ...] = ()
    repeats: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyField:
    """A field of the JSON body: text, a flag, or a list of texts."""

    name: str
    about: str
    kind: type = str
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that has passed all checks."""

    viewer: Viewer
    request: HttpRequest
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A path of the API."""

    method: str
    path: str  # below PREFIX, with {names}
    handle: Callable[[Call], Awaitable[object]]
    answer: type | None  # None: no JSON
    role: str = "read"
    params: tuple[Param, ...] = ()
    body: tuple[BodyField, ...] = ()
    status: int = 200
    kind: str = "application/json"


def match(routes: Sequence[Route], method: str, path: str) -> tuple[Route, dict[str, str]]:
    """The route of a request and the names in its path; raises `HttpError` 404 or 405."""
    is_known = False
    for route in routes:
        pattern = re.sub(r"\\\{(\w+)\\\}", lambda name: f"(?P<{name[1]}>{_NAME})", re.escape(route.path))
        matched = re.fullmatch(pattern, path)
        if matched is not None and route.method == method:
            return route, matched.groupdict()
        is_known = is_known or matched is not None
    if is_known:
        raise HttpError(405, "method", f"this address does not take {method}")
    raise HttpError(404, "unknown_path", "there is nothing at this address; GET /api/v1/schema lists what there is")


def parse_query(params: Sequence[Param], query: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The parameters by name; raises `HttpError` 400 for unknown ones and those out of range."""
    unknown = sorted(set(query) - {param.name for param in params})
    if unknown:
        known = ", ".join(param.name for param in params) or "none"
        raise HttpError(400, "unknown_parameter", f"unknown parameter {unknown[0][:50]!r}; known: {known}")
    return {param.name: _value(param, query.get(param.name, ())) for param in params}


def _value(param: Param, texts: Sequence[str]) -> Any:
    if param.repeats:
        if len(texts) > (param.high or 1) or any(not re.fullmatch(_NAME, text) for text in texts):
            raise HttpError(400, "bad_parameter", f"{param.name}: expected up to {param.high} names")
        return tuple(texts)
    if not texts:
        return param.default
    text = texts[-1]
    if param.low is not None and param.high is not None:
        number = int(text) if re.fullmatch(r"\d{1,18}", text) else -1
        if not param.low <= number <= param.high:
            raise HttpError(
                400, "out_of_range", f"{param.name}: expected {param.low} to {param.high}, got {text[:40]!r}"
            )
        return number
    if param.choices and text not in param.choices:
        raise HttpError(400, "bad_parameter", f"{param.name}: expected {' or '.join(param.choices)}, got {text[:40]!r}")
    if len(text) > 200:
        raise HttpError(400, "bad_parameter", f"{param.name}: expected at most 200 characters")
    return text


def parse_body(fields: Sequence[BodyField], request: HttpRequest) -> dict[str, Any]:
    """The fields of a JSON object; raises `HttpError` 400 or 415."""
    if request.header("content-type").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "content_type", "expected Content-Type: application/json")
    try:
        data = json.loads(request.body or b"{}")
    except (ValueError, RecursionError):
        raise HttpError(400, "bad_json", "expected JSON") from None
    if not isinstance(data, dict):
        raise HttpError(400, "bad_json", "expected a JSON object")
    unknown = sorted(set(data) - {field.name for field in fields})
    if unknown:
        raise HttpError(400, "unknown_field", f"unknown field {unknown[0][:50]!r}")
    for field in fields:
        if field.required and field.name not in data:
            raise HttpError(400, "missing_field", f"expected the field {field.name!r}")
        value = data.get(field.name)
        is_right = isinstance(value, field.kind) and (
            field.kind is not list or all(isinstance(item, str) for item in data[field.name])
        )
        if field.name in data and not is_right:
            raise HttpError(400, "bad_field", f"{field.name}: expected {_kind_name(field.kind)}")
    return data


def _kind_name(kind: type) -> str:
    return {str: "a text", bool: "true or false", list: "a list of texts"}[kind]
