"""Contract of `Updates`: one update for each lease, and what later rounds take from them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace

import pytest
from rows import PLAN, digest, evaluation_row, lease_row, model_row, report, round_row, update_row
from stores import everything_in, with_round, with_run, with_update

from coordinator.store.base import Store


def test_an_update_counts_once_per_attempt_and_device(store: Store) -> None:
    """A second one is refused together with its evaluation and the end of its lease; another attempt is another row."""
    with_update(store)
    store.leases.add([lease_row(3, "a")])
    before = everything_in(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.updates.save(update_row(lease="lease-3"), evaluation_row(num_correct=1), "lease-3")
    assert everything_in(store) == before
    store.rounds.open(round_row(attempt=2), [lease_row(4, "a", attempt=2)])
    store.updates.save(update_row(lease="lease-4", attempt=2), None, "lease-4")
    assert len(store.updates.of_attempt("r-1", 1, 2)) == 1


def test_a_lease_brings_one_update(store: Store) -> None:
    """A second one is refused even under another device's name."""
    with_update(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.updates.save(update_row("b", "lease-1"), None, "lease-1")


@pytest.mark.parametrize("state", ["RUNNING", "FROZEN"])
def test_a_lost_update_is_dropped_and_its_lease_offered_again(store: Store, state: str) -> None:
    """Both happen together; a frozen round runs again, and the update can be saved again."""
    with_update(store)
    if state == "FROZEN":
        store.rounds.freeze("r-1", 1, 1, "hash")
    store.updates.drop(update_row())
    assert store.updates.of_attempt("r-1", 1, 1) == []
    assert store.leases.of_attempt("r-1", 1, 1)[0].state == "offered"
    assert store.rounds.all("r-1")[0].state == "RUNNING"
    store.updates.save(update_row(), None, "lease-1")
    assert store.updates.of_attempt("r-1", 1, 1) == [update_row()]


@pytest.mark.parametrize("state", ["COMMITTED", "ANNOUNCED", "ABANDONED"])
def test_a_round_that_is_over_stays_over_when_an_update_is_dropped(store: Store, state: str) -> None:
    """Only a frozen round runs again."""
    with_update(store)
    if state == "ABANDONED":
        store.rounds.abandon("r-1", 1, 1, "few")
    else:
        store.rounds.commit(1, 1, model_row(1))
    if state == "ANNOUNCED":
        store.rounds.announce("r-1", 1, 1)
    store.updates.drop(update_row())
    assert store.rounds.all("r-1")[0].state == state


def test_a_saved_update_clears_the_reason_of_its_lease(store: Store) -> None:
    """The log stays, also when the update is lost later."""
    with_round(store)
    store.leases.set_state("lease-1", "expired", code="late", detail="why", log=["x"])
    store.updates.save(update_row(), None, "lease-1")
    assert store.leases.get("lease-1") == lease_row(1, "a", state="stored", log=("x",))
    store.leases.set_state("lease-1", "stored", code="c", detail="d")
    store.updates.drop(update_row())
    assert store.leases.get("lease-1") == lease_row(1, "a", state="offered")


def test_updates_are_sorted_by_device(store: Store) -> None:
    """Whatever the order in which they arrive."""
    with_run(store)
    store.rounds.open(round_row(), [lease_row(i, name) for i, name in enumerate("cab", 1)])
    for i, name in enumerate("cab", 1):
        store.updates.save(update_row(name, f"lease-{i}"), None, f"lease-{i}")
    assert [update.device for update in store.updates.of_attempt("r-1", 1, 1)] == ["a", "b", "c"]


def test_recent_updates_are_the_newest_oldest_first(store: Store) -> None:
    """Sorted by round and attempt; within an attempt the devices come in reverse order."""
    with_run(store)
    for issue, (number, attempt, device) in enumerate([(1, 1, "a"), (1, 2, "b"), (1, 2, "a"), (2, 1, "a")], 1):
        store.leases.add([lease_row(issue, device, round=number, attempt=attempt)])
        update = update_row(device, f"lease-{issue}", round=number, attempt=attempt)
        store.updates.save(update, None, f"lease-{issue}")
    assert [update.lease for update in store.updates.recent("r-1", 9)] == ["lease-1", "lease-2", "lease-3", "lease-4"]
    assert [update.lease for update in store.updates.recent("r-1", 2)] == ["lease-3", "lease-4"]


def test_updates_are_counted_for_each_committed_round(store: Store) -> None:
    """Two belong to the committed attempt of round 1; the abandoned attempt and the open round do not count."""
    with_run(store)
    store.rounds.open(round_row(), [lease_row(1, "a")])
    store.updates.save(update_row("a", "lease-1"), None, "lease-1")
    store.rounds.abandon("r-1", 1, 1, "too few")
    store.rounds.open(round_row(attempt=2), [lease_row(2, "a", attempt=2), lease_row(3, "b", attempt=2)])
    for device, lease in (("a", "lease-2"), ("b", "lease-3")):
        store.updates.save(update_row(device, lease, attempt=2), None, lease)
    assert store.updates.counts("r-1") == {}
    store.rounds.freeze("r-1", 1, 2, "set")
    store.rounds.commit(1, 2, model_row(1))
    store.rounds.open(round_row(2), [lease_row(4, "a", round=2)])
    store.updates.save(update_row("a", "lease-4", round=2), None, "lease-4")
    assert store.updates.counts("r-1") == {1: 2}
    store.rounds.announce("r-1", 1, 2)
    assert store.updates.counts("r-1") == {1: 2}
    assert store.updates.counts("other") == {}


def test_norms_come_from_committed_rounds_only(store: Store) -> None:
    """Rounds 1 and 2 are committed and 3 is running, so 2 is the newest; its abandoned attempt does not count."""
    with_run(store)
    attempts = ((1, 1, 1.0), (2, 1, 9.0), (2, 2, 2.0), (3, 1, 3.0))
    for issue, (number, attempt, norm) in enumerate(attempts, 1):
        slices = [lease_row(issue, round=number, attempt=attempt, slice="full" if number == 1 else "width:1/2")]
        store.rounds.open(round_row(number, attempt), slices)
        update = update_row(lease=f"lease-{issue}", round=number, attempt=attempt, norm=norm)
        store.updates.save(update, None, f"lease-{issue}")
    store.rounds.commit(1, 1, model_row(1))
    store.rounds.abandon("r-1", 2, 1, "few")
    store.rounds.commit(2, 2, model_row(2))
    assert store.updates.recent_norms("r-1", 5) == {"full": [1.0], "width:1/2": [2.0]}
    assert store.updates.recent_norms("r-1", 1) == {"width:1/2": [2.0]}


def test_the_newest_update_of_each_device(store: Store) -> None:
    """Of two devices in one round: both; b's update has no plan."""
    with_run(store)
    store.rounds.open(round_row(), [lease_row(1, "a"), lease_row(2, "b")])
    store.updates.save(update_row("a", "lease-1"), None, "lease-1")
    without_plan = update_row("b", "lease-2", report=report(plan=None))
    store.updates.save(without_plan, None, "lease-2")
    assert store.updates.newest("r-1") == {"a": update_row("a", "lease-1"), "b": without_plan}


def test_the_newest_counted_lease_and_the_newest_update(store: Store) -> None:
    """Rounds are saved in the order 2, 1, 3; round 3, the newest, is not committed: its lease does not count."""
    with_run(store)
    plans = {number: replace(PLAN, microbatch=number) for number in (1, 2, 3)}
    for number in (2, 1, 3):
        store.rounds.open(round_row(number), [lease_row(number, round=number)])
        update = update_row(lease=f"lease-{number}", round=number, report=report(plan=plans[number]))
        store.updates.save(update, None, f"lease-{number}")
    for number in (1, 2):
        store.rounds.commit(number, 1, model_row(number))
    assert store.updates.last_counted_lease("r-1", "a") == "lease-2"
    assert {name: update.report.plan for name, update in store.updates.newest("r-1").items()} == {"a": plans[3]}


def test_only_a_committed_round_makes_a_lease_count(store: Store) -> None:
    """The update of lease-1 counts when its round is committed, not when it is saved."""
    with_update(store)
    assert store.updates.last_counted_lease("r-1", "a") is None
    store.rounds.freeze("r-1", 1, 1, digest("set"))
    store.rounds.commit(1, 1, model_row(1))
    assert store.updates.last_counted_lease("r-1", "a") == "lease-1"
    assert store.updates.last_counted_lease("r-1", "b") is None


def test_abandoned_updates_are_not_needed_but_stay_on_record(store: Store) -> None:
    """I2: an update with a receipt is in a frozen set, or its attempt was abandoned with a row."""
    with_update(store)
    store.rounds.abandon("r-1", 1, 1, "too few")
    assert not store.blob_references.is_needed(update_row().sha256, 2)
    assert store.updates.of_attempt("r-1", 1, 1) == [update_row()]
    assert store.rounds.all("r-1")[0].reason == "too few"


def test_traffic_of_an_update_counts_with_its_row(store: Store) -> None:
    """1 + 10 bytes up and 2 + 20 down, in the run of the lease; an unknown lease counts nothing."""
    with_run(store)
    store.rounds.open(round_row(), [lease_row(1)])
    store.traffic.add("r-1", {"a": (1, 2)})
    store.updates.save(update_row(), None, "lease-1", {"a": (10, 20)})
    store.updates.save(None, None, "nobody", {"a": (100, 200)})
    assert store.traffic.by_device("r-1") == {"a": (11, 22)}


def test_the_bytes_of_a_small_update_stay_while_its_round_is_open(store: Store) -> None:
    """Until the announcement, or the end of the attempt or the run; a large one never has any here."""
    with_run(store)
    store.rounds.open(round_row(), [lease_row(1, "a"), lease_row(2, "b")])
    store.updates.save(update_row("a", "lease-1"), None, "lease-1", body=b"small")
    store.updates.save(update_row("b", "lease-2"), None, "lease-2")
    assert (store.updates.body("lease-1"), store.updates.body("lease-2")) == (b"small", None)
    store.rounds.freeze("r-1", 1, 1, "hash")
    store.rounds.commit(1, 1, model_row(1))
    assert store.updates.body("lease-1") == b"small"
    store.rounds.announce("r-1", 1, 1)
    assert store.updates.body("lease-1") is None


@pytest.mark.parametrize("end", ["abandoned", "failed", "dropped", "removed"])
def test_an_attempt_that_counts_nowhere_leaves_no_bytes(store: Store, end: str) -> None:
    """Whichever way it ended."""
    with_run(store)
    store.rounds.open(round_row(), [lease_row(1, "a")])
    store.updates.save(update_row("a", "lease-1"), None, "lease-1", body=b"small")
    ends: dict[str, Callable[[], None]] = {
        "abandoned": lambda: store.rounds.abandon("r-1", 1, 1, "few"),
        "failed": lambda: store.runs.fail("r-1", "why"),
        "dropped": lambda: store.updates.drop(update_row("a", "lease-1")),
        "removed": lambda: store.runs.remove("r-1"),
    }
    ends[end]()
    assert store.updates.body("lease-1") is None
