"""Contract of `Leases`: how leases end, and what their history says about runs and devices."""

from __future__ import annotations

import pytest
from rows import lease_row, round_row, run_row
from stores import with_run

from coordinator.store.base import Store


def test_the_drop_rate_is_the_share_of_finished_leases_without_an_update(store: Store) -> None:
    """Stored, declined and expired leases count (2 of 3); open and cancelled ones and mere evaluations do not."""
    with_run(store)
    assert store.leases.drop_rate("r-1", 100) == 0.0
    states = ["stored", "declined", "expired", "offered", "accepted", "cancelled"]
    store.rounds.open(round_row(), [lease_row(i, f"d{i}", state=state) for i, state in enumerate(states, 1)])
    store.leases.add([lease_row(50, "e", train=False, state="expired")])
    assert store.leases.drop_rate("r-1", 100) == pytest.approx(2 / 3)
    assert store.leases.drop_rate("r-1", 1) == 1.0


def test_failures_are_the_newest_failed_leases(store: Store) -> None:
    """Declined, refused and expired ones: of a device over all runs, and of a run over all devices."""
    with_run(store)
    states = ["declined", "stored", "refused", "cancelled", "expired", "offered"]
    store.rounds.open(round_row(), [lease_row(i, "ab"[i % 2], state=state) for i, state in enumerate(states, 1)])
    store.runs.add(run_row("r-2"))
    store.rounds.open(round_row(run="r-2"), [lease_row(9, "b", run="r-2", state="declined", log=("x",))])
    assert [lease.issue for lease in store.leases.device_failures("b", 9)] == [9, 5, 3, 1]
    assert [lease.issue for lease in store.leases.device_failures("b", 1)] == [9]
    assert store.leases.device_failures("b", 1)[0].log == ("x",)
    assert [lease.issue for lease in store.leases.run_failures("r-1", 2)] == [5, 3]


def test_the_slice_that_each_device_trained_last(store: Store) -> None:
    """Only leases to train that brought an update count."""
    with_run(store)
    leases = [lease_row(1, "a", slice="full"), lease_row(2, "b", train=False), lease_row(3, "c")]
    store.rounds.open(round_row(), leases)
    store.rounds.open(round_row(2), [lease_row(4, "a", round=2, slice="width:1/2"), lease_row(5, "a", round=2)])
    for lease in ("lease-1", "lease-2", "lease-4"):
        store.leases.set_state(lease, "stored")
    assert store.leases.trained_slices("r-1") == {"a": "width:1/2"}
    assert store.leases.trained_slices("r-2") == {}
