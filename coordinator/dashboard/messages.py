"""What `coordinator page` asks of a running coordinator, and the answers, as they travel over its control socket."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from coordinator import control
from edge_client.errors import InputError, PayloadError
from edge_client.records import Matches, from_map

__all__ = [
    "AddToken",
    "AddedToken",
    "ListTokens",
    "MakeLink",
    "PageLink",
    "PageRequest",
    "RemoveToken",
    "RemovedToken",
    "TokenLine",
    "TokenList",
    "ask",
    "checked",
    "parse",
]

A = TypeVar("A")

TokenName = Annotated[str, Matches(r"[A-Za-z0-9_.-][A-Za-z0-9_. -]{0,63}")]
Role = Annotated[str, Matches(r"read|operate")]


class PageRequest(Generic[A]):
    """Something that people ask about the page; `A` is the record of the answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLink:
    """An address that signs one browser in, once, within ten minutes."""

    url: str
    role: str
    minutes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeLink(PageRequest[PageLink]):
    """Make a link to the page."""

    role: Role = "operate"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A new token; only its hash is stored."""

    name: str
    role: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddToken(PageRequest[AddedToken]):
    """Make a token."""

    name: TokenName
    role: Role = "read"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLine:
    """A token without its secret."""

    name: str
    role: str
    created_s: int
    used_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenList:
    """All tokens."""

    tokens: tuple[TokenLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTokens(PageRequest[TokenList]):
    """Which tokens are there?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedToken:
    """A token that is no longer valid."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveToken(PageRequest[RemovedToken]):
    """End a token, and the sessions that were begun with it."""

    name: str


_KINDS: Mapping[str, tuple[type[PageRequest[Any]], type[Any]]] = {
    "page-link": (MakeLink, PageLink),
    "page-token-add": (AddToken, AddedToken),
    "page-token-list": (ListTokens, TokenList),
    "page-token-remove": (RemoveToken, RemovedToken),
}
_NAMES = {request: name for name, (request, _) in _KINDS.items()}


def parse(data: Mapping[str, Any]) -> PageRequest[Any] | None:
    """A request as it arrived; None if it is not about the page; raises `InputError` for one with wrong fields."""
    name = str(data.get("request", ""))
    if name not in _KINDS:
        return None
    try:
        return from_map(_KINDS[name][0], {key: value for key, value in data.items() if key != "request"}, where=name)
    except PayloadError as error:
        raise InputError(f"request {name!r}: {error.detail.removeprefix(name).lstrip('.: ')}") from None


def checked(request: PageRequest[A]) -> PageRequest[A]:
    """The request, if its fields are right; raises `InputError`."""
    named: Any = request
    fields = {field.name: getattr(named, field.name) for field in dataclasses.fields(named)}
    parsed = parse({"request": _NAMES[type(request)], **fields})
    assert parsed is not None
    return parsed


def ask(state_dir: Path, request: PageRequest[A]) -> A:
    """Ask the running coordinator; raises what it answers, or `NotRunningError`."""
    name = _NAMES[type(request)]
    named: Any = request
    fields = {field.name: getattr(named, field.name) for field in dataclasses.fields(named)}
    answer: A = from_map(_KINDS[name][1], control.exchange(state_dir, {"request": name, **fields}), where=name)
    return answer
