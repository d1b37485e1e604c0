"""The coordinator's times of an open round, in seconds since it began, by the monotonic clock.

They are kept in memory until the row that they belong to is written: a lease's with its update, the round's with its
announcement. A round that was open when this process began has none.
Covers: taking them. Does not cover: what they mean (`coordinator.timeline`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from coordinator.timeline import known_phases

__all__ = ["RoundClock"]


class RoundClock:
    """The times of the open round of a run."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began: float | None = None
        self._announced: float | None = None  # the round before
        self._round: dict[str, float] = {}
        self._leases: dict[str, dict[str, float]] = {}
        self._phases: dict[str, dict[str, float]] = {}

    def begin(self) -> None:
        """A round begins."""
        self._began = self._now()
        self._round = {} if self._announced is None else {"pause": round(self._began - self._announced, 3)}
        self._leases, self._phases, self._announced = {}, {}, None

    def note(self, moment: str) -> None:
        """Something has happened in the round."""
        if self._began is not None:
            self._round[moment] = self._seconds(self._began)

    def note_lease(self, lease: str, moment: str, *, again: bool = False) -> None:
        """Something has happened to a lease of the round. The first time counts; what may come `again`, the last."""
        if self._began is None:
            return
        moments = self._leases.setdefault(lease, {})
        if again or moment not in moments:
            moments[moment] = self._seconds(self._began)

    def note_phases(self, lease: str, phases: Mapping[str, float] | None) -> None:
        """The phases that a device reports of a lease."""
        self._phases[lease] = known_phases(phases)

    def of_lease(self, lease: str) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """The moments of a lease so far, and its phases."""
        return self._leases.get(lease, {}), self._phases.get(lease, {})

    def elapsed_s(self) -> float | None:
        """How long ago the open round began; None if none is open, or this process did not see it begin."""
        return self._now() - self._began if self._began is not None else None

    def end(self) -> Mapping[str, float]:
        """The round is announced now; returns its moments."""
        self.note("announce")
        self._began, self._announced = None, self._now()
        return self._round

    def _seconds(self, began: float) -> float:
        return round(self._now() - began, 3)
