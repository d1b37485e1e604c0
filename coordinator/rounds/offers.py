"""When a lease is offered to its device, when it is offered again, and when the device no longer counts.

Covers: the times of each lease that waits for an answer, as numbers that the caller passes in.
Does not cover: the leases themselves (`attempt`), sending (`conductor`).
"""

from __future__ import annotations

import zlib
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from coordinator.rounds.attempt import Attempt
from coordinator.rounds.instructions import CloseLease, SendAssign

__all__ = ["Offers", "Step"]

_FIRST_REPEAT_S = 3.0  # at the earliest: a repeat comes up to as much later, and each pause is longer than the last
_GROWTH = 1.5
_ANSWER_S = 15.0  # a device that does not accept in this time is no longer expected
_AWAY_S = 60.0  # neither is one that disconnects for longer than this before it accepts


class Step(Enum):
    """What to do about a lease that its device has not accepted."""

    WAIT = "wait"
    OFFER = "offer"
    AWAY = "away"
    SILENT = "silent"


# why a lease expires: code and detail of its row
_EXPIRY: dict[Step, tuple[str, str]] = {
    Step.AWAY: ("away", f"not there for {_AWAY_S:.0f} s"),
    Step.SILENT: ("no_answer", f"no answer for {_ANSWER_S:.0f} s"),
}


@dataclass(slots=True)
class _Offered:
    first_at: float
    again_at: float
    pause_s: float


def _jitter(lease: str) -> float:
    """Between 0 and 1 and the same at every call: a fleet that is asked at one moment is not asked again at one."""
    return zlib.crc32(lease.encode()) / 2**32


class Offers:
    """The offers of one attempt."""

    def __init__(self) -> None:
        self._offered: dict[str, _Offered] = {}
        self._away_since: dict[str, float] = {}

    def review(
        self, attempt: Attempt, online: AbstractSet[str], *, remaining_s: float, now: float
    ) -> list[SendAssign | CloseLease]:
        """Offer the leases that were not accepted yet; close those of devices that stay silent or away."""
        instructions: list[SendAssign | CloseLease] = []
        for lease in attempt.open_leases():
            if lease.state == "offered":
                step = self.next_step(lease.id, is_online=lease.device in online, now=now)
                if step is Step.OFFER:
                    instructions.append(SendAssign(lease, remaining_s))
                elif step is not Step.WAIT:
                    instructions.append(attempt.close(lease, "expired", *_EXPIRY[step]))
        return instructions

    def next_step(self, lease: str, *, is_online: bool, now: float) -> Step:
        """What to do now; `OFFER` starts or continues the device's time to answer."""
        if not is_online:
            self.postpone(lease)
            return Step.AWAY if now - self._away_since.setdefault(lease, now) > _AWAY_S else Step.WAIT
        self._away_since.pop(lease, None)
        offered = self._offered.setdefault(lease, _Offered(first_at=now, again_at=now, pause_s=_FIRST_REPEAT_S))
        if now - offered.first_at > _ANSWER_S:
            return Step.SILENT
        if now < offered.again_at:
            return Step.WAIT
        offered.again_at = now + offered.pause_s * (1 + _jitter(lease))
        offered.pause_s *= _GROWTH
        return Step.OFFER

    def postpone(self, lease: str) -> None:
        """The device has not been asked after all: its time to answer begins with the next offer."""
        self._offered.pop(lease, None)
