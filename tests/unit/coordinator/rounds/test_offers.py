"""When a lease is offered, offered again, and given up."""

from __future__ import annotations

from rows import lease_row, round_row

from coordinator.rounds.attempt import Attempt
from coordinator.rounds.instructions import CloseLease, SendAssign
from coordinator.rounds.offers import Offers, Step


def _times(lease: str) -> list[float]:
    """When a device that never answers is asked, looked at every tenth of a second."""
    offers, asked = Offers(), []
    for tenth in range(150):
        if offers.next_step(lease, is_online=True, now=tenth / 10) is Step.OFFER:
            asked.append(tenth / 10)
    return asked


def test_an_offer_is_repeated_less_and_less_often() -> None:
    """The first pause is 3 to 6 s, the second 4.5 to 9: each 1.5 times the one before, up to a tenth."""
    for number in range(50):
        first, second, *more = _times(f"lease-{number}")
        assert first == 0.0
        assert 3.0 <= second <= 6.1
        assert all(abs(third - second - 1.5 * second) <= 0.3 for third in more[:1])


def test_a_fleet_that_was_asked_at_one_moment_is_not_asked_again_at_one() -> None:
    """Of 1,000 leases none of the six half seconds has more than a quarter of the first repeats; evenly: a sixth."""
    seconds = [_times(f"lease-{number}")[1] for number in range(1000)]
    assert max(sum(low <= s < low + 0.5 for s in seconds) for low in (3.0, 3.5, 4.0, 4.5, 5.0, 5.5)) < 250


def test_a_silent_device_has_fifteen_seconds() -> None:
    """Counted from the first offer, whatever was repeated."""
    offers = Offers()
    assert offers.next_step("l", is_online=True, now=0.0) is Step.OFFER
    assert offers.next_step("l", is_online=True, now=15.0) is Step.OFFER
    assert offers.next_step("l", is_online=True, now=15.1) is Step.SILENT


def test_a_device_that_is_away_has_sixty_seconds_and_starts_anew_when_it_is_back() -> None:
    """Away from 1 to 61 s; back at 61.5 s it gets its 15 s again, and then 60 s of absence."""
    offers = Offers()
    offers.next_step("l", is_online=True, now=0.0)
    assert offers.next_step("l", is_online=False, now=1.0) is Step.WAIT
    assert offers.next_step("l", is_online=False, now=61.0) is Step.WAIT
    assert offers.next_step("l", is_online=True, now=61.5) is Step.OFFER
    assert offers.next_step("l", is_online=False, now=62.0) is Step.WAIT
    assert offers.next_step("l", is_online=False, now=122.1) is Step.AWAY


def test_a_postponed_offer_does_not_use_up_the_time_to_answer() -> None:
    """Offered at 0 s, but its part is not made yet: the 15 s begin with the offer at 20 s."""
    offers = Offers()
    offers.next_step("l", is_online=True, now=0.0)
    offers.postpone("l")
    assert offers.next_step("l", is_online=True, now=20.0) is Step.OFFER
    assert offers.next_step("l", is_online=True, now=35.1) is Step.SILENT


def test_only_leases_that_were_not_accepted_are_reviewed() -> None:
    """a is offered its lease with the time that is left, b has accepted, c is silent and its lease expires."""
    leases = (lease_row(1), lease_row(2, "b", state="accepted"), lease_row(3, "c"))
    attempt, offers = Attempt(round_row(), leases), Offers()
    offers.next_step("lease-3", is_online=True, now=0.0)
    assert offers.review(attempt, {"a", "b", "c"}, remaining_s=40.0, now=20.0) == [
        SendAssign(leases[0], 40.0),
        CloseLease("lease-3", "expired", "no_answer", "no answer for 15 s"),
    ]
    assert offers.review(attempt, set(), remaining_s=0.0, now=21.0) == []
    assert offers.review(attempt, set(), remaining_s=0.0, now=81.5) == [
        CloseLease("lease-1", "expired", "away", "not there for 60 s")
    ]
