"""When a round begins: enough devices, a moment for others, a pause after a failure."""

from __future__ import annotations

import pytest

from coordinator.rounds.next_attempt import NextAttempt


def test_a_round_waits_two_seconds_for_more_devices() -> None:
    """Enough from second 10 on: it begins at 12; if every device is connected, at once."""
    attempt = NextAttempt(0.0)
    steps = [attempt.may_begin(has_enough=True, is_fleet_complete=False, now=now) for now in (10.0, 11.9, 12.0)]
    assert steps == [False, False, True]
    assert NextAttempt(0.0).may_begin(has_enough=True, is_fleet_complete=True, now=0.0)


def test_the_two_seconds_start_again_when_a_device_leaves() -> None:
    """Enough at 10, not at 11, enough again at 11.5: it begins at 13.5."""
    attempt = NextAttempt(0.0)
    for has_enough, now in ((True, 10.0), (False, 11.0), (True, 11.5), (True, 13.4)):
        assert not attempt.may_begin(has_enough=has_enough, is_fleet_complete=False, now=now)
    assert attempt.may_begin(has_enough=True, is_fleet_complete=False, now=13.5)


@pytest.mark.parametrize(("failed", "pause_s"), [(1, 2.0), (2, 4.0), (5, 32.0), (6, 60.0), (2000, 60.0)])
def test_the_pause_doubles_with_every_failure(failed: int, pause_s: float) -> None:
    """2 s after the first attempt, at most 60 s."""
    attempt = NextAttempt(0.0)
    attempt.after_failure(failed)
    attempt.pause(100.0)
    assert attempt.number == failed + 1
    assert not attempt.may_begin(has_enough=True, is_fleet_complete=True, now=100.0 + pause_s - 0.1)
    assert attempt.may_begin(has_enough=True, is_fleet_complete=True, now=100.0 + pause_s)


def test_the_next_round_has_its_first_attempt() -> None:
    """After a success the count starts again."""
    attempt = NextAttempt(0.0)
    attempt.after_failure(3)
    attempt.after_success()
    assert attempt.number == 1
