"""Reads the files that people write, table by table, into frozen dataclasses.

Types, ranges, defaults and help texts are declared once, at the field; the parser, its errors and the documentation
(`key_descriptions`) use them. Keys are written with dashes, sizes as `512MB` or `1.5GiB`, durations as `90s` or
`30min`. The schemas are in `device_file` and `run_file`.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from edge_client import records
from edge_client.config.quantities import parse_bytes, parse_duration
from edge_client.config.toml_text import toml_value
from edge_client.errors import InputError, PayloadError
from edge_client.records import Between

__all__ = [
    "Auto",
    "Bytes",
    "Options",
    "Seconds",
    "Unit",
    "described",
    "item_of_tables",
    "parse_table",
    "read_toml",
    "takes_other_keys",
    "to_table",
    "without_none",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unit:
    """A number that may also be written as text with a unit."""

    kind: str  # bytes | seconds


@dataclass(frozen=True, slots=True)
class Auto:
    """The text `auto` stands for None: fedfit chooses."""


@dataclass(frozen=True, slots=True)
class OtherKeys:
    """Collects the keys of a table that the dataclass does not name: a method's parameters, a model's options."""


Bytes = Annotated[int, Unit("bytes"), Between(0, 2**53)]
Seconds = Annotated[float, Unit("seconds"), Between(0.001, 366 * 86400)]
Options = Annotated[Mapping[str, Any], OtherKeys()]


# Keys that are planned but not served by this version: the parser names them in its error, so that nobody believes
# that they have an effect.
_NOT_YET: Mapping[str, Sequence[str]] = {
    "train": ("augment",),
}


def described(help_text: str, default: Any = dataclasses.MISSING, *, later: bool = False) -> Any:
    """Declare a key of a file: a dataclass field with a help text, and with a default unless the key is required.

    `later`: clients of earlier versions do not know the key; it does not travel while it has its default.
    """
    metadata = {"help": help_text, "later": later}
    if default is dataclasses.MISSING:
        return field(metadata=metadata)
    if isinstance(default, type) or callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raises `InputError`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error


def parse_table(cls: type[T], table: Mapping[str, Any], *, source: str, section: str = "") -> T:
    """Turn one table of a file into its dataclass; every error names the file, the section and the key."""
    hints = typing.get_type_hints(cls, include_extras=True)
    helps = {f.name: f.metadata.get("help", "") for f in dataclasses.fields(typing.cast(Any, cls))}
    other_keys = next((name for name, hint in hints.items() if takes_other_keys(hint)), None)
    values: dict[str, Any] = {other_keys: {}} if other_keys else {}
    for key, value in table.items():
        name = key.replace("-", "_")
        place = f"{section}.{key}" if section else key
        if name in values and name != other_keys:
            raise InputError(f"{source}: {place!r} stands there twice, with a dash and with an underscore")
        if name in hints and name != other_keys:
            values[name] = _value(hints[name], value, source, place, helps[name])
        elif other_keys:
            values[other_keys][name] = value
        elif name in _NOT_YET.get(section, ()):
            raise InputError(f"{source}: {place!r} is not served by this version of fedfit yet; remove it")
        else:
            raise InputError(f"{source}: unknown key {place!r}{_nearest(name, hints)}")
    for f in dataclasses.fields(typing.cast(Any, cls)):
        if f.name not in values and f.default is f.default_factory is dataclasses.MISSING:
            raise InputError(f"{source}: {section + '.' if section else ''}{f.name} is missing ({f.metadata['help']})")
    return cls(**values)


def to_table(record: Any) -> dict[str, Any]:
    """Turn a record back into a table that `parse_table` reads, defaults included, keys without a value left out."""
    hints = typing.get_type_hints(type(record), include_extras=True)
    table: dict[str, Any] = {}
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        if takes_other_keys(hints[f.name]):
            table |= {key.replace("_", "-"): inner for key, inner in value.items()}
        elif dataclasses.is_dataclass(value):
            table[f.name.replace("_", "-")] = to_table(value)
        elif item_of_tables(hints[f.name]) is not None:
            table[f.name] = {key: to_table(inner) for key, inner in value.items()}
        elif value is None and _is_auto(hints[f.name]):
            table[f.name.replace("_", "-")] = "auto"
        elif value is not None:
            table[f.name.replace("_", "-")] = list(value) if isinstance(value, tuple) else value
    return table


def takes_other_keys(hint: Any) -> bool:
    return any(isinstance(extra, OtherKeys) for extra in getattr(hint, "__metadata__", ()))


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    import difflib  # only for a typo: it would cost every daemon 0.2 MB

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    keys = ", ".join(key.replace("_", "-") for key in known)
    return f"; did you mean {close[0].replace('_', '-')!r}?" if close else f"; known: {keys}"


def _value(hint: Any, value: Any, source: str, place: str, help_text: str) -> Any:
    hint = without_none(hint)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, str) and "name" in typing.get_type_hints(hint):
            value = {"name": value}  # method = "fedavg" is short for method = { name = "fedavg" }
        if not isinstance(value, Mapping):
            raise InputError(f"{source}: {place}: expected a table, got {value!r}")
        return parse_table(typing.cast(type, hint), value, source=source, section=place)
    if (item := item_of_tables(hint)) is not None and isinstance(value, Mapping):
        return {key: _value(item, inner, source, f"{place}.{key}", help_text) for key, inner in value.items()}
    try:
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, Auto) and value == "auto":
                return None
            if isinstance(extra, Auto) and not _is_number(value) and not _has_unit(hint):
                raise InputError(f'expected a number {_range(hint)} or "auto", got {toml_value(value)}')
            if isinstance(extra, Unit) and isinstance(value, str):
                value = parse_bytes(value) if extra.kind == "bytes" else parse_duration(value)
        return records.check_value(hint, value, place)
    except (InputError, PayloadError) as error:
        detail = error.detail if isinstance(error, PayloadError) else f"{place}: {error}"
        raise InputError(f"{source}: {detail} ({help_text})") from None


def _is_auto(hint: Any) -> bool:
    return any(isinstance(extra, Auto) for extra in getattr(without_none(hint), "__metadata__", ()))


def _has_unit(hint: Any) -> bool:
    return any(isinstance(extra, Unit) for extra in hint.__metadata__)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _range(hint: Any) -> str:
    return next(f"from {e.low:.15g} to {e.high:.15g}" for e in hint.__metadata__ if isinstance(e, Between))


def item_of_tables(hint: Any) -> Any:
    """The dataclass of each table in a table of tables; None for any other type."""
    item = typing.get_args(hint)[1] if typing.get_origin(hint) is Mapping else None
    return item if dataclasses.is_dataclass(item) else None


def without_none(hint: Any) -> Any:
    """Turn `X | None` into X."""
    inner = typing.get_args(hint)
    return next(a for a in inner if a is not type(None)) if type(None) in inner else hint
