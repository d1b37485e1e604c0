"""Contract of `Rounds`: attempts, from their opening to the announcement of their model."""

from __future__ import annotations

import sqlite3

import pytest
from rows import digest, lease_row, left_out_row, model_row, round_row, run_row
from stores import everything_in, with_round, with_run, with_update

from coordinator.store.base import Store


def test_a_version_exists_once(store: Store) -> None:
    """The second commit of version 1 fails and changes nothing."""
    with_update(store)
    store.rounds.commit(1, 1, model_row(1))
    before = everything_in(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.rounds.commit(1, 1, model_row(1, sha256=digest("fork")))
    assert everything_in(store) == before


def test_a_round_is_opened_with_its_leases_or_not_at_all(store: Store) -> None:
    """The issue of the second lease is taken, so that neither the round nor the first lease is added."""
    with_round(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.rounds.open(round_row(2), [lease_row(3, round=2), lease_row(2, "c", id="x", round=2)])
    assert [r.number for r in store.rounds.all("r-1")] == [1]
    assert store.leases.get("lease-3") is None


def test_the_newest_attempt_is_the_last_round(store: Store) -> None:
    """Attempts are ordered by the round's number, then by the number of the attempt."""
    with_run(store)
    assert store.rounds.last("r-1") is None
    for number, attempt in ((1, 1), (1, 2), (2, 1)):
        store.rounds.open(round_row(number, attempt), [])
        last = store.rounds.last("r-1")
        assert last is not None
        assert (last.number, last.attempt) == (number, attempt)


def test_an_announced_round_keeps_its_traffic(store: Store) -> None:
    """5 + 1 bytes up and 7 + 2 down had travelled by then; what comes later belongs to the next round."""
    with_round(store)
    store.traffic.add("r-1", {"a": (5, 7), "b": (1, 2)})
    store.rounds.commit(1, 1, model_row(1))
    assert store.rounds.all("r-1")[0].bytes_up is None
    store.rounds.announce("r-1", 1, 1)
    store.traffic.add("r-1", {"a": (100, 100)})
    (row,) = store.rounds.all("r-1")
    assert (row.state, row.bytes_up, row.bytes_down) == ("ANNOUNCED", 6, 9)


def test_knowledge_left_out_is_kept_once_for_each_device_and_code(store: Store) -> None:
    """A later round replaces the detail of an earlier one, but not other codes; all of it goes with its run."""
    with_run(store).runs.add(run_row("r-2"))
    store.rounds.commit(1, 1, model_row(1), [left_out_row("b"), left_out_row("a"), left_out_row("", "no_public")])
    store.rounds.commit(2, 1, model_row(2), [left_out_row("a", round=2, detail="else"), left_out_row("a", "signature")])
    store.rounds.commit(1, 1, model_row(1, "r-2"), [left_out_row("c", run="r-2")])
    rows = [(row.device, row.code, row.round, row.detail) for row in store.rounds.left_out("r-1")]
    first, second = ("", "no_public", 1, "why"), ("a", "signature", 1, "why")
    assert rows == [first, second, ("a", "silent", 2, "else"), ("b", "silent", 1, "why")]
    store.runs.remove("r-1")
    assert store.rounds.left_out("r-1") == []
    assert len(store.rounds.left_out("r-2")) == 1
