"""Whether an attempt goes on, ends, gets more time or more devices, or is abandoned: a pure decision.

Covers: rules R3 and R6 of `machine`. Does not cover: carrying the decision out (`machine`).
"""

from __future__ import annotations

from enum import Enum

from coordinator.rounds.attempt import Attempt
from coordinator.rounds.candidates import Candidates
from coordinator.rounds.timer import RoundTimer

__all__ = ["Move", "next_move", "substitutes"]


class Move(Enum):
    """What becomes of a running attempt."""

    WAIT = "wait"
    EXTEND = "extend"  # its deadline, once
    SUBSTITUTE = "substitute"  # ask devices that were not asked in this attempt
    END = "end"  # it counts
    ABANDON = "abandon"


def next_move(attempt: Attempt, timer: RoundTimer, candidates: Candidates, *, minimum: int, now: float) -> Move:
    """`minimum`: with how many updates a round counts at least, by the run's file."""
    is_overdue = timer.is_overdue(now)
    is_over = is_overdue or not attempt.is_expecting()
    if attempt.only_evaluates:
        return Move.END if is_over else Move.WAIT
    if not attempt.is_complete and not (attempt.has_quorum and is_over):
        if not is_over:
            return Move.WAIT
        if is_overdue and not attempt.row.extended:
            return Move.EXTEND
        if not is_overdue and substitutes(attempt, candidates):
            return Move.SUBSTITUTE
        if not is_overdue and (timer.may_reconnect(now) or _evaluators_may_help(attempt, candidates)):
            return Move.WAIT
        if len(attempt.updates) < attempt.quorum_of_the_able(minimum):
            return Move.ABANDON
    if is_overdue or not attempt.is_expecting_evaluators():
        return Move.END
    timer.training_ended(now)
    return Move.WAIT if timer.waits_for_evaluators(now) else Move.END


def substitutes(attempt: Attempt, candidates: Candidates) -> list[str]:
    """The devices to ask instead of those that failed; none if the quorum is out of reach even with them."""
    unasked = candidates.unasked(attempt.devices_asked_to_train() | attempt.busy_devices())
    devices = unasked[: attempt.num_missing]
    return devices if attempt.reaches_quorum_with(len(devices)) else []


def _evaluators_may_help(attempt: Attempt, candidates: Candidates) -> bool:
    """Whether devices that still evaluate could train afterwards; another attempt would ask the same cohort again."""
    others = set(candidates.unasked(attempt.devices_asked_to_train()))
    return bool(others & attempt.busy_devices()) and attempt.reaches_quorum_with(len(others))
