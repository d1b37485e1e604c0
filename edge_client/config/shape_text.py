"""The shape of one sample as people type it: `3x96x96`. Both packages read `--input` with this."""

from __future__ import annotations

import re

from edge_client.errors import InputError

__all__ = ["parse_shape", "typed_shape"]

_MAX_SIZE = 99_999  # a task's samples may be longer than a run file's `input` allows


def parse_shape(text: str) -> tuple[int, ...]:
    """`3x96x96`, or `3X96X96`, as numbers; raises `InputError`."""
    parts = text.lower().split("x")
    if not all(re.fullmatch("[0-9]+", part) and 0 < int(part) <= _MAX_SIZE for part in parts):
        raise InputError(
            f"--input: expected a shape such as 3x96x96, sizes from 1 to {_MAX_SIZE} with an x between, "
            f"got {text[:80]!r}"
        )
    return tuple(int(part) for part in parts)


def typed_shape(text: str | None) -> tuple[int, ...] | None:
    """The value of the option; None if it was not given."""
    return parse_shape(text) if text is not None else None
