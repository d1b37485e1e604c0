"""Server-sent events: numbered, encoded once for all viewers, and remembered for those who come back.

A viewer who was away names the last number that it saw and gets what it missed; if that is forgotten, it gets `resync`
and asks for everything again.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from coordinator.run_details import plain

__all__ = ["EVENT_KINDS", "MAX_STREAMS", "Events", "encode"]

EVENT_KINDS = ("run", "round", "fleet", "devices", "evaluation", "alerts", "log", "job", "resync", "bye")
MAX_STREAMS = 32
_REMEMBERED = 512
_REMEMBERED_BYTES = 8 << 20
_QUIET_S = 15.0


class _Event(NamedTuple):
    number: int
    frame: bytes


def encode(record: object) -> bytes:
    """A record as compact JSON."""
    return json.dumps(record, default=plain, separators=(",", ":"), allow_nan=False).encode()


class Events:
    """The newest events, and the viewers who wait for the next one. Used in the loop of the page's thread."""

    def __init__(self, first: int) -> None:
        """`first` is higher than any number of an earlier process."""
        self.number = first
        self._ring: deque[_Event] = deque(maxlen=_REMEMBERED)
        self._bytes = 0
        self._waiting: set[asyncio.Event] = set()
        self._is_closed = False

    @property
    def num_viewers(self) -> int:
        """How many streams are open."""
        return len(self._waiting)

    def publish(self, kind: str, data: bytes) -> None:
        """Send an event to all viewers; `data` is JSON without line breaks."""
        self.number += 1
        frame = b"id: %d\nevent: %s\ndata: %s\n\n" % (self.number, kind.encode(), data)
        if len(self._ring) == self._ring.maxlen:
            self._bytes -= len(self._ring[0].frame)
        self._ring.append(_Event(self.number, frame))
        self._bytes += len(frame)
        while self._bytes > _REMEMBERED_BYTES and len(self._ring) > 1:
            self._bytes -= len(self._ring.popleft().frame)
        for waiting in self._waiting:
            waiting.set()

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        for waiting in self._waiting:
            waiting.set()

    async def stream(self, since: int | None, still_valid: Callable[[], bool]) -> AsyncIterator[bytes]:
        """The frames after `since`, as they come; ends when the session that asked for them is no longer valid."""
        more = asyncio.Event()
        self._waiting.add(more)
        try:
            seen = self.number if since is None else since
            yield b"retry: 1000\n\n"
            if not self._has_all_after(seen):
                seen = self.number
                yield b"id: %d\nevent: resync\ndata: {}\n\n" % seen
            while not self._is_closed:
                more.clear()
                frames = [event.frame for event in self._ring if event.number > seen]
                if frames:
                    if not self._has_all_after(seen):
                        frames = [b"id: %d\nevent: resync\ndata: {}\n\n" % self.number]
                    seen = self.number
                    yield b"".join(frames)
                    continue
                try:
                    await asyncio.wait_for(more.wait(), _QUIET_S)
                except (TimeoutError, asyncio.TimeoutError):
                    if not still_valid():
                        break
                    yield b": still here\n\n"
            yield b"event: bye\ndata: {}\n\n"
        finally:
            self._waiting.discard(more)

    def _has_all_after(self, number: int) -> bool:
        if number > self.number:
            return False
        return number == self.number or bool(self._ring and self._ring[0].number <= number + 1)
