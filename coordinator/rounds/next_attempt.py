"""When the next attempt of a round begins: with enough devices, after a moment for others, after a failure's pause.

Covers: times as numbers that the caller passes in; no clock is read here. Does not cover: how many devices are enough.
"""

from __future__ import annotations

__all__ = ["NextAttempt"]

_SETTLE_S = 2.0  # more devices may be about to connect
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 60.0
_MOST_DOUBLINGS = 10  # a run may be tried for weeks


class NextAttempt:
    """The attempt that comes next while no round is open."""

    def __init__(self, now: float) -> None:
        self.number = 1
        self._not_before = now
        self._enough_since: float | None = None

    def may_begin(self, *, has_enough: bool, is_fleet_complete: bool, now: float) -> bool:
        """Whether the round begins now; nobody is awaited when every enrolled device is connected."""
        if not has_enough or now < self._not_before:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        return is_fleet_complete or now - self._enough_since >= _SETTLE_S

    def begun(self) -> None:
        """The attempt has begun."""
        self._enough_since = None

    def after_success(self) -> None:
        """A round has ended: the next one has its first attempt."""
        self.number = 1

    def after_failure(self, failed_attempt: int) -> None:
        """An attempt was abandoned: the same round is tried again."""
        self.number = failed_attempt + 1

    def pause(self, now: float) -> None:
        """Wait 2, 4, 8, ... 60 s before the next attempt, longer after every failure."""
        doublings = min(self.number - 2, _MOST_DOUBLINGS)
        self._not_before = now + min(_FIRST_PAUSE_S * 2**doublings, _LONGEST_PAUSE_S)
