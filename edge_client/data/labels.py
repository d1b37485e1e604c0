"""Labels by name: what a data set calls its classes, as positions in the run's `classes`.

Two folders with different class sets number their classes differently, so names decide wherever there are any; the
device's `rename` is applied first. Integers without names are positions already, and are range-checked.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import InputError

__all__ = ["Labels", "UnknownClassError", "from_array", "positions"]

Indices = NDArray[np.int64]

_MAX_LISTED = 8
_NUMBER = re.compile(r"\d{1,9}")


class UnknownClassError(InputError):
    """A class that the run does not have; the message has the line of device.toml that would mend it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """One number per sample: a position in `names`, or without names in the run's `classes`."""

    values: Indices
    names: tuple[str, ...] | None = None
    text: bool = False  # the names were read from text, where a position and a name look the same


def from_array(values: NDArray[Any], where: str, names: Sequence[str] | None = None) -> Labels:
    """Labels of an array of integers or texts; raises `InputError` with the first sample that has another kind."""
    if values.ndim != 1:
        raise InputError(f"{where}: expected one label per sample, got shape {list(values.shape)}")
    if values.dtype.kind == "U":
        names_in_order, numbers = np.unique(values, return_inverse=True)
        return Labels(values=numbers.astype(np.int64).reshape(-1), names=tuple(str(name) for name in names_in_order))
    if values.dtype.kind not in "iu":
        shown = repr(values[0].item())[:40] if len(values) else "none"
        raise InputError(f"{where}: expected integer labels or class names, got {values.dtype} (sample 0: {shown})")
    if names is not None:
        _check_range(values, len(names), where, "its own classes")
    return Labels(values=values.astype(np.int64), names=tuple(names) if names is not None else None)


def positions(labels: Labels, classes: Sequence[str], rename: Mapping[str, str], where: str) -> Indices:
    """Each sample's position in `classes`; raises `UnknownClassError` or `InputError`."""
    if labels.names is None:
        _check_range(labels.values, len(classes), where, "the run's classes")
        return labels.values
    present = {int(number) for number in np.unique(labels.values)}
    names = {number: labels.names[number] for number in sorted(present)}
    if labels.text and _are_numbers(names, classes, rename):
        values = np.array([int(name) for name in labels.names], dtype=np.int64)[labels.values]
        _check_range(values, len(classes), where, "the run's classes")
        return values
    known = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in names.values() if rename.get(name, name) not in known]
    if unknown:
        used = {rename.get(name, name) for name in names.values()}
        free = [name for name in classes if name not in used]
        raise UnknownClassError(_unknown(unknown, classes, free or classes, rename, where))
    table = np.full(len(labels.names), -1, dtype=np.int64)
    for number, name in names.items():
        table[number] = known[rename.get(name, name)]
    return table[labels.values]


def _are_numbers(names: Mapping[int, str], classes: Sequence[str], rename: Mapping[str, str]) -> bool:
    """Whether labels in a text file are positions: decided by the run alone, or two devices could decide otherwise."""
    if any(_NUMBER.fullmatch(name) for name in (*classes, *rename)):
        return False
    return all(_NUMBER.fullmatch(name) for name in names.values())


def _check_range(values: NDArray[Any], num_classes: int, where: str, whose: str) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= num_classes))
    if len(wrong):
        at = int(wrong[0])
        raise InputError(
            f"{where}: expected labels from 0 to {num_classes - 1} ({whose}), got {values[at]} at sample {at}"
        )


def _unknown(
    unknown: Sequence[str], classes: Sequence[str], free: Sequence[str], rename: Mapping[str, str], where: str
) -> str:
    """`free`: classes that the device does not have under their own names, of which one is proposed."""
    listed = unknown[:_MAX_LISTED]
    more = f" and {len(unknown) - len(listed)} more" if len(unknown) > len(listed) else ""
    renamed = {**rename, **{name: _nearest(name, free) for name in listed}}
    line = ", ".join(f"{_key(name)} = {json.dumps(to, ensure_ascii=False)}" for name, to in renamed.items())
    shown = ", ".join(f"{name!r} (renamed to {rename[name]!r})" if name in rename else repr(name) for name in listed)
    return (
        f"{where}: {'class' if len(unknown) == 1 else 'classes'} {shown}{more} not in the run, which has "
        f"{', '.join(classes[:20])}{', ...' if len(classes) > 20 else ''}; write the run's name of each into "
        f"device.toml, and start the client again: rename = {{ {line} }}"
    )


def _nearest(name: str, classes: Sequence[str]) -> str:
    lower = {known.lower(): known for known in reversed(classes)}
    return lower[difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.0)[0]]


def _key(name: str) -> str:
    """A key as TOML writes it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
