"""Why a run ends: a stop rule of its file holds, or somebody asked for it.

Covers: the reason, and for how long the run has been active. Does not cover: the rules themselves (`stopping`).
"""

from __future__ import annotations

from coordinator.rounds.stopping import Scoreboard

__all__ = ["Ending"]

_AWAIT_FLEET_S = 60.0


class Ending:
    """The end of one run, once it is in sight."""

    def __init__(self, scores: Scoreboard, *, elapsed_s: float, now: float) -> None:
        """`elapsed_s`: for how long the run was active in earlier processes."""
        self._scores = scores
        self._began = now - elapsed_s
        self._decided_at = now
        self.reason = ""  # the stop rule that holds; empty while none does
        self.is_stop_asked = False

    @property
    def is_decided(self) -> bool:
        """Whether a stop rule holds: the newest version is the last."""
        return bool(self.reason)

    def elapsed_s(self, now: float) -> float:
        """For how long the run has been active."""
        return now - self._began

    def check(self, version: int, now: float) -> None:
        """Apply the stop rules to a version; the first reason stays."""
        if not self.reason:
            self.reason, self._decided_at = self._scores.end(version, self.elapsed_s(now)), now

    def has_awaited_fleet(self, now: float) -> bool:
        """Whether the last evaluation has waited long enough for devices that are not connected."""
        return self.is_decided and now - self._decided_at > _AWAIT_FLEET_S
