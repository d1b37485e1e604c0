"""Describes every key of a file for people: type, default, range and help, from the fields that the parser uses."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from edge_client.config.quantities import format_bytes
from edge_client.config.tables import Unit, item_of_tables, takes_other_keys, without_none
from edge_client.records import Between, Matches

__all__ = ["DescribedKey", "describe"]


class DescribedKey(NamedTuple):
    """One key of a file, as the documentation shows it."""

    key: str
    type: str
    default: str
    range: str
    help: str


_TYPE_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_NO_LIMIT = 2**53


def describe(cls: type, section: str = "") -> list[DescribedKey]:
    """Every key of a file in its order; a table comes before its own keys, which are written `table.key`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    rows: list[DescribedKey] = []
    for f in dataclasses.fields(typing.cast(Any, cls)):
        hint = without_none(hints[f.name])
        key = f"{section}*" if takes_other_keys(hint) else section + f.name.replace("_", "-")
        default = _default_text(hint, f)
        if dataclasses.is_dataclass(hint):
            rows.append(DescribedKey(key, "table", default, "", f.metadata["help"]))
            rows += describe(typing.cast(type, hint), f"{key}.")
        elif (item := item_of_tables(hint)) is not None:
            rows.append(DescribedKey(key, _type_text(hint), default, "", f.metadata["help"]))
            rows += describe(typing.cast(type, item), f"{key}.NAME.")
        else:
            rows.append(DescribedKey(key, _type_text(hint), default, _range_text(hint), f.metadata["help"]))
    return rows


def _type_text(hint: Any) -> str:
    if takes_other_keys(hint):
        return "any"
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, Unit):
            return "size" if extra.kind == "bytes" else "duration"
    hint = _plain(hint)
    if item_of_tables(hint) is not None:
        return "table of tables"
    if typing.get_origin(hint) is Mapping:
        return f"table of {_type_text(typing.get_args(hint)[1])}"
    if typing.get_origin(hint) is tuple:
        return f"list of {_type_text(typing.get_args(hint)[0])}s"
    return _TYPE_NAMES[hint]


def _range_text(hint: Any) -> str:
    """The limits of a value, or of each item of a list."""
    if typing.get_origin(_plain(hint)) is tuple:
        return ", ".join(_range_text(item) for item in typing.get_args(_plain(hint)) if item is not Ellipsis)
    extras = getattr(hint, "__metadata__", ())
    unit = " s" if any(isinstance(e, Unit) and e.kind == "seconds" for e in extras) else ""
    limits = (_limit_text(extra, unit) for extra in extras if isinstance(extra, (Between, Matches)))
    return ", ".join(text for text in limits if text)


def _limit_text(limit: Between | Matches, unit: str) -> str:
    if isinstance(limit, Between):
        high = "or more" if limit.high >= _NO_LIMIT else f"to {limit.high:.15g}{unit}"
        return f"{limit.low:.15g}{unit} {high}"
    if length := re.fullmatch(r"\(\?s\)\.\{(\d+),(\d+)\}", limit.pattern):
        return f"{length[1]} to {length[2]} characters"
    if re.fullmatch(r"[a-z0-9_-]+(\|[a-z0-9_-]+)*", limit.pattern):
        return " or ".join(f"`{word}`" for word in limit.pattern.split("|"))
    return "" if re.search(r"[|(]", limit.pattern) else f"`{limit.pattern}`"  # no range: the help text explains it


def _default_text(hint: Any, f: dataclasses.Field[Any]) -> str:
    if f.default is f.default_factory is dataclasses.MISSING:
        return "required"
    if f.default is dataclasses.MISSING or f.default is None or f.default == "":
        return ""
    if _type_text(hint) == "size":
        return f"`{format_bytes(f.default)}`"
    shown = json.dumps(f.default)
    return f"`{shown} s`" if _type_text(hint) == "duration" else f"`{shown}`"


def _plain(hint: Any) -> Any:
    """An annotated type without its annotations."""
    return typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
