"""A user's own methods, from a Python file: `coordinator simulate --method ./mine.py:Mine` tries one.

    # mine.py
    class Mine(PlainClient): ...                     # what devices do; the server does what FedAvg's does
    mine = Entry(MineParameters, method)             # or a card, as built-in methods have one

Covers: the file's name among methods, loading it, and errors of its code, which name its line. A name has the object
and the hash of the file (`mine-0a1b2c3d4e5f`), so that a changed file is another method wherever results, measured
memory or devices' state are kept by name. The processes of a simulation find the file by their environment.
Only what was typed on this machine comes here: no name and no byte from the network does, and a fleet knows no such
method. Does not cover: running the file (`task.Source`), trying it (`coordinator.cli.simulate`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from edge_client.config.tables import parse_table
from edge_client.errors import InputError, NoSuchNameError
from edge_client.knowledge.schema import KnowledgeRules
from edge_client.methods.base import Method, PlainClient, PlanRules
from edge_client.methods.card import Card, Exchange, any_slice, no_plan_rules
from edge_client.methods.cards.fedavg import FedAvgParameters
from edge_client.methods.slices import Slicing
from edge_client.task.task import Source, read_source
from edge_client.user_code import UserCode

__all__ = ["find", "guard", "register"]

_PLACES = "FEDFIT_OWN_METHODS"  # of the processes of a simulation: a JSON object, name -> FILE.py:OBJECT
_TYPED = re.compile(r"((?:[a-z0-9_-]+\+)*)(.+\.py):([A-Za-z_]\w*)((?:\+[a-z0-9_-]+)*)")
_NAMED = re.compile(r"[a-z0-9_-]+-[0-9a-f]{12}")
_MAX_SHOWN = 24  # characters of the object
_WHAT = "method"

_loaded: dict[str, Card] = {}


@contextmanager
def register(methods: str) -> Iterator[str]:
    """The names of `fedavg,inco+./mine.py:Mine`, which this process and those that it starts know inside.

    Raises `InputError` for a file that cannot be read.
    """
    before = os.environ.get(_PLACES)
    places: dict[str, str] = {}
    names = [_name(text.strip(), places) for text in methods.split(",")]
    if places:
        os.environ[_PLACES] = json.dumps(places)
    try:
        yield ",".join(names)
    finally:
        _loaded.clear()
        if before is not None:
            os.environ[_PLACES] = before
        else:
            os.environ.pop(_PLACES, None)


def _name(typed: str, places: dict[str, str]) -> str:
    """The name of a method as it was typed; a file in it is added to the places."""
    match = _TYPED.fullmatch(typed)
    if match is None:
        if ".py" in typed:
            raise InputError(f"--method: expected a method of one's own as FILE.py:OBJECT, got {typed!r}")
        return typed
    over, path, object_, under = match.groups()
    source = read_source(Path(path).absolute(), object_, what=_WHAT)
    name = _name_of(source)
    places[name] = f"{source.path}:{object_}"
    return f"{over}{name}{under}"


def _name_of(source: Source) -> str:
    shown = re.sub(r"[^a-z0-9]+", "-", source.name.lower()).strip("-")[:_MAX_SHOWN] or _WHAT
    return f"{shown}-{source.sha256[:12]}"


def find(name: str) -> Card | None:
    """The card of a user's method; None for a name that is none.

    Raises `NoSuchNameError` where nobody tries it, and `InputError` for a file that is no method or has changed.
    """
    if name not in _loaded and _NAMED.fullmatch(name):
        source = _source(name)
        if source is None:
            raise NoSuchNameError(
                f"unknown method {name!r}: it comes from a Python file, which only a simulation tries "
                "(coordinator simulate --method FILE.py:OBJECT); a fleet runs those of `coordinator methods list`"
            )
        if _name_of(source) != name:
            raise InputError(f"{source.path} has changed since this simulation began; type the command again")
        _loaded[name] = _card(source)
    return _loaded.get(name)


def guard(method: str, doing: str, *, user_lines_only: bool = False) -> AbstractContextManager[object]:
    """Guard our code that calls a method: whatever goes wrong with a user's method becomes an `InputError`.

    That includes what fails in our code because of it, such as a term without a value; not so with `user_lines_only`.
    """
    places = [place for name, place in _places().items() if name in method.split("+")]
    if not places:
        return nullcontext()
    return UserCode(places[0].rpartition(":")[0], doing, user_lines_only=user_lines_only)


def _places() -> dict[str, str]:
    places: dict[str, str] = json.loads(os.environ.get(_PLACES, "{}"))
    return places


def _source(name: str) -> Source | None:
    path, _, object_ = _places().get(name, "").rpartition(":")
    return read_source(Path(path), object_, what=_WHAT) if path else None


def _card(source: Source) -> Card:
    """The card that the file's object is or means, with every call guarded; raises `InputError` for another object."""
    card = source.object()
    if isinstance(card, type) and issubclass(card, PlainClient):
        card = Card(FedAvgParameters, _with_plain_server(card), paper=source.path)
    if not isinstance(card, Card):
        raise InputError(
            f"{source.path}: {source.name}: expected a class that derives from PlainClient (edge_client.methods.base), "
            f"or an Entry (edge_client.methods.entry), got {card!r:.80}"
        )
    _check_parameters(card.parameters, source)

    def guarded(name: str, kind: type) -> Callable[..., Any]:
        """The card's function; what it raises names its line, and what it returns is of this type."""
        call = getattr(card, name)
        if call in (None, no_plan_rules, any_slice):  # the registry asks whether a card says something
            return call  # type: ignore[no-any-return]

        def checked(*arguments: Any, **named: Any) -> Any:
            with UserCode(source.path, name):
                result = call(*arguments, **named)
            if not isinstance(result, kind):
                expected = f"{source.name}: expected {name} to return {kind.__name__}"
                raise InputError(f"{source.path}: {expected}, got {result!r:.80}")
            return result

        return checked

    return dataclasses.replace(
        card,
        load=guarded("load", Method),
        exchange=guarded("exchange", Exchange),
        plans=guarded("plans", PlanRules),
        slicing=guarded("slicing", Slicing),
        knowledge=guarded("knowledge", KnowledgeRules),
        has_global_model=guarded("has_global_model", bool),
    )


def _with_plain_server(client: type[PlainClient]) -> Callable[[Any], Method]:
    def load(parameters: Any) -> Method:
        from edge_client.methods.fedavg import CoverageServer  # torch

        return Method(client=client, server=CoverageServer())

    return load


def _check_parameters(parameters: object, source: Source) -> None:
    """As run files describe them: a dataclass whose fields have defaults of their types."""
    where = f"{source.path}: {source.name}"
    if not isinstance(parameters, type) or not dataclasses.is_dataclass(parameters):
        raise InputError(f"{where}: expected parameters as a dataclass, got {parameters!r:.80}")
    for f in dataclasses.fields(parameters):
        if f.default is dataclasses.MISSING:
            raise InputError(f"{where}: expected a default for the parameter {f.name!r}, got none")
    with UserCode(source.path, "its parameters"):
        parse_table(parameters, {f.name: f.default for f in dataclasses.fields(parameters)}, source=where)
