"""Which devices have been heard lately. No I/O, no clock.

The set is kept up to date: a message costs one entry in a dictionary, and a question looks only at devices whose time
may have run out since the last one, not at the whole fleet.
"""

from __future__ import annotations

import heapq

__all__ = ["Liveness"]


class Liveness:
    """Devices, each present until a while after its last message."""

    def __init__(self, absent_after_s: float) -> None:
        self._absent_after_s = absent_after_s
        self._until: dict[str, float] = {}  # device -> until when it is present without a further message
        self._due: list[tuple[float, str]] = []  # a heap: when to look at a device again; at most one entry for each
        self._has_entry: set[str] = set()
        self._present: frozenset[str] | None = None  # None: has changed

    def heard(self, device: str, now: float) -> None:
        """A message of a device came."""
        if device not in self._until:
            self._present = None
        self._until[device] = until = now + self._absent_after_s
        if device not in self._has_entry:
            self._has_entry.add(device)
            heapq.heappush(self._due, (until, device))

    def left(self, device: str) -> None:
        """A device is gone, whenever it was heard."""
        if self._until.pop(device, None) is not None:
            self._present = None

    def present(self, now: float) -> frozenset[str]:
        """All devices that are present; the same object as long as nothing has changed."""
        while self._due and self._due[0][0] < now:
            _, device = heapq.heappop(self._due)
            until = self._until.get(device)
            if until is not None and until >= now:  # it was heard since
                heapq.heappush(self._due, (until, device))
                continue
            self._has_entry.discard(device)
            self.left(device)
        if self._present is None:
            self._present = frozenset(self._until)
        return self._present
