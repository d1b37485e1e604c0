"""How long to wait before a message that may be lost is repeated: longer each time, and random for each device.

A coordinator that is late gets no more messages for it: the first repeat leaves it time to answer, and the repeats of a
fleet spread over as much time again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Pace"]

_GROWTH = 1.5


class Pace:
    """The waits between the repeats of one message: anywhere between `pause` and twice that, where `pause` grows."""

    def __init__(
        self, first_s: float, longest_s: float, jitter: Callable[[float, float], float] = random.uniform
    ) -> None:
        """The pause is `first_s` before the first repeat and never longer than `longest_s`."""
        self._first_s = self._pause_s = first_s
        self._longest_s = longest_s
        self._jitter = jitter

    def restart(self) -> None:
        """Begin with the shortest pause: the message was answered, or the reason for long pauses is over."""
        self._pause_s = self._first_s

    def next_s(self) -> float:
        """The wait before the next repeat."""
        pause_s, self._pause_s = self._pause_s, min(_GROWTH * self._pause_s, self._longest_s)
        return pause_s + self._jitter(0.0, pause_s)
