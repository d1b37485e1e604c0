"""The newest log lines of this process, kept for the page: a handler of `logging` with a short memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["LogLine", "LogRing"]

_LINES = 2000
_LONGEST = 500


class LogLine(NamedTuple):
    """A line with what it is about; empty or 0 where that is nothing."""

    number: int
    at_s: float  # wall clock
    level: str
    device: str
    run: str
    round: int
    text: str


class LogRing(logging.Handler):
    """Keeps the newest lines; any thread may log, and any thread may read."""

    def __init__(self, in_hand: Callable[[], tuple[str, int]]) -> None:
        """`in_hand` looks up the run and the round that a line is about which names no others."""
        super().__init__(logging.INFO)
        self._in_hand = in_hand
        self._lines: deque[LogLine] = deque(maxlen=_LINES)
        self._number = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        fields = record.__dict__
        run, number = self._in_hand()
        self._number += 1
        self._lines.append(
            LogLine(
                self._number,
                record.created,
                record.levelname.lower(),
                str(fields.get("about_device", "")),
                str(fields.get("about_run", run)),
                int(fields.get("about_round", number)),
                record.getMessage()[:_LONGEST],
            )
        )

    @property
    def newest(self) -> int:
        """The number of the newest line."""
        return self._number

    def lines(self) -> list[LogLine]:
        """All kept lines, oldest first."""
        return list(self._lines)
