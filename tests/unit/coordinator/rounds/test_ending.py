"""Why a run ends, and for how long it has been active."""

from __future__ import annotations

import pytest
from rows import run_file

from coordinator.rounds.ending import Ending
from coordinator.rounds.stopping import Scoreboard


def _ending(*, elapsed_s: float = 0.0, now: float = 0.0, **stop: object) -> Ending:
    return Ending(Scoreboard(run_file(stop=stop), {}), elapsed_s=elapsed_s, now=now)


def test_the_first_rule_that_holds_stays_the_reason() -> None:
    """Two rounds: decided with version 2, and not decided anew with version 3."""
    ending = _ending(rounds=2)
    ending.check(1, 10.0)
    assert not ending.is_decided
    ending.check(2, 20.0)
    ending.check(3, 30.0)
    assert ending.reason == "2 rounds"


def test_the_time_before_a_restart_counts() -> None:
    """300 s before, 60 s since second 1000: 0.1 h are over."""
    ending = _ending(elapsed_s=300.0, now=1000.0, hours=0.1)
    assert ending.elapsed_s(1059.0) == pytest.approx(359.0)
    ending.check(1, 1059.0)
    assert not ending.is_decided
    ending.check(1, 1060.0)
    assert ending.reason == "0.1 hours are over after 1 rounds"


def test_the_fleet_is_awaited_for_a_minute_once_the_end_is_decided() -> None:
    """Decided at 20 s: until 80 s; before there is an end, nothing is over."""
    ending = _ending(rounds=1)
    assert not ending.has_awaited_fleet(1e6)
    ending.check(0, 10.0)
    ending.check(1, 20.0)
    assert not ending.has_awaited_fleet(80.0)
    assert ending.has_awaited_fleet(80.1)
