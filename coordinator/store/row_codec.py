"""Rows to columns and back: flags are 0 or 1, maps and sequences are JSON, everything else is a column as it is."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from typing import Any, TypeVar

from edge_client.records import Report, TrainingPlan, from_map, to_map

__all__ = ["from_columns", "to_column", "to_columns"]

R = TypeVar("R")

_FLAGS = {"train", "evaluate", "extended", "dry"}
_JSON = {"labels", "file", "log", "confusion", "environment", "input", "moments", "phases"}


def to_columns(row: object) -> dict[str, Any]:
    """The columns of a row (any dataclass of `rows`), by name."""
    return {field.name: to_column(getattr(row, field.name)) for field in dataclasses.fields(row)}  # type: ignore[arg-type]


def to_column(value: Any) -> str | float | int | None:
    """One value as SQLite stores it."""
    if isinstance(value, (str, float, type(None))):
        return value
    if isinstance(value, (bool, int)):
        return int(value)
    return json.dumps(to_map(value), separators=(",", ":"))


def from_columns(cls: type[R], columns: sqlite3.Row) -> R:
    """The row of class `cls` that these columns hold; columns that the class does not have are ignored."""
    values = {field.name: _from_column(field.name, columns[field.name]) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**values)


def _from_column(name: str, value: Any) -> Any:
    if name in _FLAGS:
        return bool(value)
    if name in _JSON:
        decoded = json.loads(value)
        return tuple(decoded) if isinstance(decoded, list) else decoded
    if name == "plan" and value is not None:
        return from_map(TrainingPlan, json.loads(value))
    if name == "report":
        return from_map(Report, json.loads(value))
    return value
