"""Contract of `PageAccess`: tokens, sessions and what was done on the page."""

from __future__ import annotations

import pytest

from coordinator.store.base import Store
from coordinator.store.rows import PageActionRow, PageSessionRow, PageTokenRow
from edge_client.errors import ConflictError


def _token(name: str) -> PageTokenRow:
    return PageTokenRow(name=name, sha256=f"hash of {name}", role="read", created_s=5)


def _session(name: str, *, expires_s: int) -> PageSessionRow:
    return PageSessionRow(sha256=f"cookie of {name}", name=name, role="read", csrf="c", expires_s=expires_s)


def test_a_token_is_known_by_its_hash_until_it_is_removed(store: Store) -> None:
    """Its name is taken while it exists."""
    store.page_access.add_token(_token("wall"))
    with pytest.raises(ConflictError, match="'wall' exists"):
        store.page_access.add_token(PageTokenRow(name="wall", sha256="other", role="read", created_s=5))
    store.page_access.token_used("hash of wall", 9)
    (row,) = store.page_access.tokens()
    assert (row.name, row.used_s) == ("wall", 9)
    assert store.page_access.token("hash of wall") == row
    assert store.page_access.token("hash of door") is None
    assert store.page_access.remove_token("wall")
    assert not store.page_access.remove_token("wall")
    assert store.page_access.token("hash of wall") is None


def test_a_session_ends_when_it_expires_or_its_token_is_removed(store: Store) -> None:
    """At second 10 a session until second 10 is over; a new one removes those that are over."""
    access = store.page_access
    access.add_session(_session("anna", expires_s=10), 1)
    assert access.session("cookie of anna", 9) is not None
    assert access.session("cookie of anna", 10) is None
    access.add_session(_session("ben", expires_s=30), 20)
    assert access.session("cookie of anna", 5) is None  # gone, not only over
    access.end_session("cookie of ben")
    assert access.session("cookie of ben", 20) is None
    access.add_token(_token("wall"))
    access.add_session(_session("wall", expires_s=99), 20)
    access.remove_token("wall")
    assert access.session("cookie of wall", 20) is None


def test_the_newest_thousand_actions_are_kept(store: Store) -> None:
    """Of 1,002 the first two are gone."""
    for number in range(1002):
        store.page_access.add_action(PageActionRow(at_s=number, name="anna", action="stop", detail=""))
    assert [row.at_s for row in store.page_access.actions(2)] == [1001, 1000]
    assert min(row.at_s for row in store.page_access.actions(5000)) == 2
