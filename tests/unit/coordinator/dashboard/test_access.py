"""Links, sessions and how often somebody may try."""

from __future__ import annotations

from coordinator.dashboard.access import LINK_S, SESSION_S, Links, Rate, digest, new_session


def test_a_link_gives_its_role_once_and_for_ten_minutes() -> None:
    """At second 599 it is valid, at second 600 it is not; the second use is none."""
    now = [0.0]
    links = Links(lambda: now[0])
    first, second, third = links.make("read"), links.make("operate"), links.make("read")
    assert links.use(first) == "read"
    assert links.use(first) is None
    now[0] = LINK_S - 1
    assert links.use(second) == "operate"
    now[0] = LINK_S
    assert links.use(third) is None
    assert links.use("made up") is None


def test_a_session_stores_no_secret() -> None:
    """The row holds the hash of the cookie; it is valid for twelve hours, and no two are alike."""
    cookie, row = new_session("anna", "read", 100)
    other, _ = new_session("anna", "read", 100)
    assert row.sha256 == digest(cookie)
    assert cookie not in (row.sha256, row.csrf, other)
    assert row.expires_s == 100 + SESSION_S


def test_a_rate_forgets_what_is_older_than_its_time() -> None:
    """Two in ten seconds: a third is too many until the first is ten seconds old; others are not touched."""
    now = [0.0]
    rate = Rate(2, 10.0, lambda: now[0])
    for at in (0.0, 4.0):
        now[0] = at
        assert not rate.is_exceeded("a")
        rate.count("a")
    assert rate.is_exceeded("a")
    assert not rate.is_exceeded("b")
    now[0] = 10.0
    assert not rate.is_exceeded("a")
