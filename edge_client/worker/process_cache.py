"""What a process loads once for all of its assignments: everything that follows from files which never change.

A process that does one assignment has an empty cache. A simulation's worker keeps one from assignment to assignment.
Nothing that an assignment changes is put here, so that each begins as in a process of its own, warmed up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from edge_client.records import to_map

__all__ = ["ProcessCache"]

T = TypeVar("T")


class ProcessCache:
    """Values by kind and key, loaded at their first use."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def once(self, kind: str, key: object, load: Callable[[], T]) -> T:
        """What `load` returns, or returned before for an equal `key`: a record or plain data."""
        name = f"{kind} {json.dumps(to_map(key), sort_keys=True)}"
        if name not in self._values:
            self._values[name] = load()
        value: T = self._values[name]
        return value
