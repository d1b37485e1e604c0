"""The coordinator's times of a round, by a clock that the test sets."""

from __future__ import annotations

from coordinator.conductor.round_clock import RoundClock


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_times_are_seconds_since_the_round_began() -> None:
    """The first offer counts, the last request for a part; the next round begins 0.5 s after the announcement."""
    now = _Clock()
    clock = RoundClock(now)
    clock.begin()
    for now.now in (101.0, 102.0):
        clock.note_lease("l", "offer")
        clock.note_lease("l", "fetch", again=True)
    clock.note_phases("l", {"train": 0.5, "nonsense": 1.0})
    assert clock.of_lease("l") == ({"offer": 1.0, "fetch": 2.0}, {"train": 0.5})
    assert clock.of_lease("other") == ({}, {})
    now.now = 103.0
    clock.note("freeze")
    now.now = 104.0
    assert clock.end() == {"freeze": 3.0, "announce": 4.0}
    now.now = 104.5
    clock.begin()
    assert clock.of_lease("l") == ({}, {})
    assert clock.end() == {"pause": 0.5, "announce": 0.0}


def test_a_round_whose_beginning_was_not_seen_has_no_times() -> None:
    """The coordinator was started again meanwhile; what the device says of its phases is kept."""
    clock = RoundClock(_Clock())
    clock.note("freeze")
    clock.note_lease("l", "offer")
    clock.note_phases("l", {"train": 0.5})
    assert clock.of_lease("l") == ({}, {"train": 0.5})
    assert clock.end() == {}
