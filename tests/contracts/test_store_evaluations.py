"""Contract of `Evaluations`: one for each version, device and slice."""

from __future__ import annotations

from rows import evaluation_row
from stores import with_run, with_update

from coordinator.store.base import Store
from coordinator.store.rows import SERVER


def test_an_evaluation_that_is_repeated_replaces_the_first(store: Store) -> None:
    """An abandoned attempt evaluated the same version on the same device."""
    with_update(store)
    store.updates.save(None, evaluation_row(num_correct=9), "lease-2")
    assert [row.num_correct for row in store.evaluations.all("r-1", 0)] == [9]
    assert store.evaluations.all("r-1", 1) == []
    assert store.evaluations.versions("r-1") == [0]


def test_the_server_evaluates_beside_the_devices(store: Store) -> None:
    """It has neither update nor lease; a repeated one replaces the first."""
    with_update(store)
    store.evaluations.save(evaluation_row(SERVER, num_correct=1))
    store.evaluations.save(evaluation_row(SERVER, num_correct=2))
    assert [(row.device, row.num_correct) for row in store.evaluations.all("r-1")] == [(SERVER, 2), ("a", 7)]


def test_a_version_is_evaluated_slice_by_slice(store: Store) -> None:
    """There is one row for each architecture; a repeated one replaces the first."""
    with_run(store)
    for correct, slice_name in ((1, "full"), (2, "width:1/2"), (3, "full")):
        store.evaluations.save(evaluation_row(SERVER, num_correct=correct, slice=slice_name))
    assert [(row.slice, row.num_correct) for row in store.evaluations.all("r-1")] == [("full", 3), ("width:1/2", 2)]
