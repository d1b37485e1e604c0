"""How much nonsense a device may send, with a clock that the test moves."""

from __future__ import annotations

import pytest

from coordinator.fleet.quota import MAX_MESSAGES, MAX_USELESS_BYTES, PERIOD_S, Quota


@pytest.mark.parametrize(("messages", "useless_bytes"), [(1, 0), (0, 120_000)], ids=["messages", "bytes"])
def test_a_flood_suspends_its_device_and_nobody_else(messages: int, useless_bytes: int) -> None:
    """2,000 messages or 32 MiB (279 pieces of 120,000 bytes) are borne, one more is not."""
    quota = Quota()
    borne = MAX_MESSAGES if messages else MAX_USELESS_BYTES // useless_bytes
    assert borne in (2000, 279)
    quota.charge("calm", 0.0, messages=1)
    for _ in range(borne):
        quota.charge("evil", 0.0, messages=messages, useless_bytes=useless_bytes)
    assert not quota.is_suspended("evil", 0.0)
    quota.charge("evil", 0.0, messages=messages, useless_bytes=useless_bytes)
    assert quota.suspended(0.0) == {"evil"}


def test_a_suspension_ends_by_itself_and_doubles_up_to_an_hour() -> None:
    """60, 120, ... 1,920, 3,600 and again 3,600 s; a calm hour later it is 60 s again."""
    quota, now = Quota(), 0.0
    for expected in (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0):
        quota.charge("evil", now, messages=MAX_MESSAGES + 1)
        assert quota.is_suspended("evil", now + expected - 0.1)
        assert not quota.is_suspended("evil", now + expected)
        now += expected
    now += 3601.0
    quota.charge("evil", now, messages=MAX_MESSAGES + 1)
    assert not quota.is_suspended("evil", now + 60.0)


def test_what_comes_slowly_is_borne_for_ever() -> None:
    """Half of what a minute may bring, every half minute, for an hour."""
    quota = Quota()
    for turn in range(120):
        quota.charge("chatty", turn * PERIOD_S / 2, messages=MAX_MESSAGES / 2, useless_bytes=MAX_USELESS_BYTES // 2)
        assert quota.suspended(turn * PERIOD_S / 2) == frozenset()


def test_drops_are_told_once_in_ten_seconds_with_their_number() -> None:
    """The first at once; then 9 more, which are told with the one that comes 10 s later: 10."""
    quota = Quota()
    assert quota.drops_to_report("a", 100.0) == 1
    assert [quota.drops_to_report("a", 100.0 + step) for step in range(9)] == [0] * 9
    assert quota.drops_to_report("b", 101.0) == 1
    assert quota.drops_to_report("a", 110.0) == 10


def test_a_device_that_is_gone_is_forgotten() -> None:
    """Enrolled again under its name, it begins anew."""
    quota = Quota()
    quota.charge("a", 0.0, messages=MAX_MESSAGES + 1)
    quota.keep_only({"b"})
    assert not quota.is_suspended("a", 1.0)
