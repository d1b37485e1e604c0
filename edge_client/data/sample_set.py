"""A whole data set, whatever its files are: before a device's part is taken and before its labels are those of a run.

It is opened and checked from end to end when it is made, and read sample by sample later. `array_set`, `tables`,
`images` and `user_dataset` make such sets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edge_client.data.arrays import Indices, Rows
from edge_client.data.labels import Labels
from edge_client.errors import InputError

__all__ = ["Convert", "Keys", "SampleSet", "find_key"]

Convert = Callable[[NDArray[Any]], NDArray[np.float32]]
Keys = Mapping[str, Callable[[], NDArray[Any]]]  # name -> what reads a number or a text for each sample

_USUAL_KEYS = ("key", "person", "subject", "user", "site", "device")  # what a partition by `key` alone looks for


@runtime_checkable
class SampleSet(Protocol):
    """Samples with their labels."""

    where: str  # for messages
    labels: Labels
    shape: tuple[int, ...] | None  # of one sample; None: whatever the model wants
    held_bytes: int  # what the whole set keeps in memory, however many parts are taken of it
    keys: Keys  # what else is known of each sample: its person, its site

    def rows(self, indices: Indices, shape: tuple[int, ...]) -> tuple[Rows, Convert]:
        """The samples at `indices`, and what makes float32 of `shape` of them; raises `InputError` if nothing can."""


def find_key(known: Collection[str], name: str, where: str) -> str:
    """The key that a partition names: `name`, or the usual one if it is empty; raises `InputError` if there is none."""
    key = name or next((usual for usual in _USUAL_KEYS if usual in known), "")
    if key not in known:
        expected = repr(name) if name else f"named {', '.join(_USUAL_KEYS[:-1])} or {_USUAL_KEYS[-1]}"
        raise InputError(
            f"{where}: partition {(f'key:{name}' if name else 'key')!r} needs a key {expected} for each sample, "
            f"got {', '.join(sorted(known)) or 'none'}"
        )
    return key
