"""How long a round may take: its deadline, one extension, and how long it waits for devices that only evaluate.

Covers: times as numbers that the caller passes in; no clock is read here.
Does not cover: whether a round has enough updates (`progress`), pauses between attempts (`next_attempt`).
"""

from __future__ import annotations

__all__ = ["RoundTimer"]

_SAVE_EVERY_S = 5.0
_RETURN_S = 10.0  # after a restart of the coordinator, devices reconnect one by one
_EVALUATORS_SHARE = 0.5  # of the time that training took: so long a round waits for devices that only evaluate
_DRY_S = 300.0  # a plan takes a worker's start and a look at the data
_PATIENT_S = 366 * 86400.0  # how long a simulated round takes here says nothing about devices


class RoundTimer:
    """The times of the open round, and when its remaining time was saved last."""

    def __init__(self, now: float, *, is_patient: bool = False) -> None:
        """`is_patient`: the deadline of the run's file does not hold, and everybody is awaited (simulations)."""
        self._is_patient = is_patient
        self._deadline = now
        self._opened_at = now
        self._trained_at: float | None = None  # when it only waited for evaluations
        self._patient_until = now
        self._saved_at = now

    def allowed_s(self, deadline_s: float, *, dry: bool) -> float:
        """How long a new round may take; `deadline_s` is that of the run's file."""
        longest_s = _PATIENT_S if self._is_patient else deadline_s
        return min(longest_s, _DRY_S) if dry else longest_s

    def start(self, remaining_s: float, now: float) -> None:
        """A round has begun, or begins again after a restart with the time that was left."""
        self._deadline = now + remaining_s
        self._opened_at = now
        self._trained_at = None

    def wait_for_reconnects(self, now: float) -> None:
        """The coordinator has restarted: give the devices time to reconnect."""
        self._patient_until = now + _RETURN_S

    def extend(self, extra_s: float, now: float) -> None:
        """Move the deadline."""
        self._deadline = now + extra_s

    def remaining_s(self, now: float) -> float:
        """Until the deadline; never negative."""
        return max(0.0, self._deadline - now)

    def is_overdue(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return now >= self._deadline

    def may_reconnect(self, now: float) -> bool:
        """Whether devices may still be on their way back after a restart."""
        return now < self._patient_until

    def is_save_due(self, now: float) -> bool:
        """Whether the remaining time should be written down again."""
        return now - self._saved_at >= _SAVE_EVERY_S

    def was_saved(self, now: float) -> None:
        """The remaining time was written down."""
        self._saved_at = now

    def training_ended(self, now: float) -> None:
        """Nobody trains any more; only the first call counts."""
        if self._trained_at is None:
            self._trained_at = now

    def waits_for_evaluators(self, now: float) -> bool:
        """Whether devices that only evaluate get more time after training has ended."""
        if self._is_patient or self._trained_at is None:
            return True
        return now - self._trained_at < _EVALUATORS_SHARE * (self._trained_at - self._opened_at)
