"""What becomes of a running attempt: each move with the smallest situation that calls for it."""

from __future__ import annotations

from typing import Any

import pytest
from rows import lease_row, round_row, update_row

from coordinator.rounds.attempt import Attempt
from coordinator.rounds.candidates import Candidates
from coordinator.rounds.progress import Move, next_move, substitutes
from coordinator.rounds.timer import RoundTimer
from coordinator.store.rows import LeaseRow


def _move(
    *leases: LeaseRow, updates: str = "", online: str = "", now: float = 10.0, minimum: int = 1, **row: Any
) -> Move:
    """Of an attempt that opened at 0 s with 60 s; one device trained for each letter of `updates`."""
    timer = RoundTimer(0.0)
    timer.start(60.0, 0.0)
    return next_move(_attempt(*leases, updates=updates, **row), timer, _online(online), minimum=minimum, now=now)


def _attempt(*leases: LeaseRow, updates: str = "", **row: Any) -> Attempt:
    stored = [lease_row(100 + i, name, state="stored") for i, name in enumerate(updates)]
    return Attempt(round_row(**row), [*leases, *stored], updates=[update_row(x.device, x.id) for x in stored])


def _online(names: str) -> Candidates:
    candidates = Candidates(drop_rate=0.0, asks_spares=True)
    candidates.online = frozenset(names)
    return candidates


OPEN = lease_row(1, "x")
CRASHED = lease_row(2, "y", state="declined", code="crashed")
EVALUATOR = lease_row(3, "z", train=False)


def test_an_attempt_waits_while_answers_are_expected() -> None:
    """Quorum or not: x may still bring the update that the goal lacks."""
    assert _move(OPEN, goal=3, quorum=3) is Move.WAIT
    assert _move(OPEN, updates="ab", goal=3, quorum=2) is Move.WAIT


def test_an_attempt_ends_with_its_goal_or_with_a_quorum_when_nobody_is_left() -> None:
    """Two of two; or two of three after the third crashed, or at the deadline."""
    assert _move(OPEN, updates="ab", goal=2) is Move.END
    assert _move(CRASHED, updates="ab", goal=3, quorum=2) is Move.END
    assert _move(OPEN, updates="ab", goal=3, quorum=2, now=60.0) is Move.END


def test_an_attempt_without_quorum_is_extended_once() -> None:
    """At the deadline; the second time it is abandoned."""
    assert _move(OPEN, goal=2, now=60.0) is Move.EXTEND
    assert _move(OPEN, goal=2, now=60.0, extended=True) is Move.ABANDON


def test_substitutes_are_asked_if_they_reach_the_quorum() -> None:
    """One of two arrived, y crashed: b is enough; without an update, b alone is not, and the attempt is over."""
    assert _move(CRASHED, updates="a", online="aby") is Move.SUBSTITUTE
    assert _move(CRASHED, online="by") is Move.ABANDON
    assert substitutes(_attempt(CRASHED, updates="a"), _online("abcy")) == ["b"]


def test_an_evaluator_that_could_train_afterwards_is_awaited() -> None:
    """z is busy now; with its update, one of one would be there."""
    assert _move(CRASHED, EVALUATOR, online="yz", goal=1, quorum=1) is Move.WAIT
    assert _move(CRASHED, online="y", goal=1, quorum=1) is Move.ABANDON


def test_devices_may_reconnect_before_an_attempt_is_given_up() -> None:
    """Ten seconds after a restart."""
    timer = RoundTimer(0.0)
    timer.start(60.0, 0.0)
    timer.wait_for_reconnects(0.0)
    moves = [next_move(_attempt(CRASHED), timer, _online(""), minimum=1, now=now) for now in (9.9, 10.0)]
    assert moves == [Move.WAIT, Move.ABANDON]


@pytest.mark.parametrize(("code", "move"), [("nothing_fits", Move.END), ("crashed", Move.ABANDON)])
def test_a_round_counts_if_it_lacks_only_devices_that_can_never_take_part(code: str, move: Move) -> None:
    """Three of five arrived, quorum four: without two that can never take part, 80 % of three are enough."""
    declined = [lease_row(i, name, state="declined", code=code) for i, name in enumerate("xy")]
    assert _move(*declined, updates="abc", goal=5, quorum=4) is move


def test_a_complete_attempt_waits_for_evaluators_but_not_beyond_its_deadline() -> None:
    """z evaluates: at 10 s it gets five more; at the deadline nobody waits."""
    timer = RoundTimer(0.0)
    timer.start(60.0, 0.0)
    attempt = _attempt(EVALUATOR, updates="ab")
    moves = [next_move(attempt, timer, _online("abz"), minimum=1, now=now) for now in (10.0, 14.9, 15.0)]
    assert moves == [Move.WAIT, Move.WAIT, Move.END]
    assert _move(EVALUATOR, updates="ab", now=60.0) is Move.END


def test_a_round_that_only_evaluates_ends_with_the_last_answer_or_its_deadline() -> None:
    """Goal 0: no update is needed."""
    assert _move(EVALUATOR, goal=0, quorum=0) is Move.WAIT
    assert _move(EVALUATOR, goal=0, quorum=0, now=60.0) is Move.END
    assert _move(goal=0, quorum=0) is Move.END
