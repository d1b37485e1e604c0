"""The deadline of a round, its extension, and the patience for devices that only evaluate."""

from __future__ import annotations

import pytest

from coordinator.rounds.timer import RoundTimer


def test_a_round_is_overdue_at_its_deadline() -> None:
    """60 s from second 100 on; nothing is left afterwards, never less."""
    timer = RoundTimer(0.0)
    timer.start(60.0, 100.0)
    assert timer.remaining_s(130.0) == 30.0
    assert not timer.is_overdue(159.9)
    assert timer.is_overdue(160.0)
    assert timer.remaining_s(200.0) == 0.0


def test_an_extension_counts_from_now() -> None:
    """At 160 s half of the deadline is added: until 190 s."""
    timer = RoundTimer(0.0)
    timer.start(60.0, 100.0)
    timer.extend(30.0, 160.0)
    assert timer.remaining_s(160.0) == 30.0
    assert timer.is_overdue(190.0)


@pytest.mark.parametrize(
    ("is_patient", "dry", "allowed_s"),
    [(False, False, 1800.0), (False, True, 300.0), (True, False, 366 * 86400.0), (True, True, 300.0)],
)
def test_how_long_a_round_may_take(is_patient: bool, dry: bool, allowed_s: float) -> None:
    """A dry run gets five minutes, a simulation a year, any other run what its file says."""
    assert RoundTimer(0.0, is_patient=is_patient).allowed_s(1800.0, dry=dry) == allowed_s


def test_the_remaining_time_is_saved_every_five_seconds() -> None:
    """Also over the end of a round: a new round does not start the five seconds again."""
    timer = RoundTimer(0.0)
    assert not timer.is_save_due(4.9)
    assert timer.is_save_due(5.0)
    timer.was_saved(5.0)
    timer.start(60.0, 8.0)
    assert not timer.is_save_due(9.9)
    assert timer.is_save_due(10.0)


def test_evaluators_get_half_of_the_time_that_training_took() -> None:
    """Ten seconds of training: five more, counted from the first call."""
    timer = RoundTimer(0.0)
    timer.start(60.0, 0.0)
    timer.training_ended(10.0)
    timer.training_ended(14.0)
    assert timer.waits_for_evaluators(14.9)
    assert not timer.waits_for_evaluators(15.0)
    timer.start(60.0, 20.0)
    assert timer.waits_for_evaluators(50.0)  # of a new round, nobody has ended training


def test_a_simulation_waits_for_every_evaluator() -> None:
    """However long that takes."""
    timer = RoundTimer(0.0, is_patient=True)
    timer.start(60.0, 0.0)
    timer.training_ended(10.0)
    assert timer.waits_for_evaluators(1e6)


def test_devices_get_ten_seconds_to_reconnect_after_a_restart() -> None:
    """A machine that starts with nothing open does not wait."""
    timer = RoundTimer(100.0)
    assert not timer.may_reconnect(100.0)
    timer.wait_for_reconnects(100.0)
    assert timer.may_reconnect(109.9)
    assert not timer.may_reconnect(110.0)
