"""Contract of `Runs`: the queue, the states of runs, and what their devices were."""

from __future__ import annotations

import pytest
from rows import digest, model_row, run_row, update_row
from stores import with_run, with_update

from coordinator.store.base import Store


def test_runs_are_numbered_by_name(store: Store) -> None:
    """r-1 and r-10 make r-11 the next; r-x-1 and rr-3 have other names."""
    assert store.runs.next_number("r") == 1
    for run in ("r-1", "r-10", "r-x-1", "rr-3"):
        store.runs.add(run_row(run))
    assert store.runs.next_number("r") == 11
    assert [run.id for run in store.runs.all()] == ["r-1", "r-10", "r-x-1", "rr-3"]
    assert store.runs.get("nobody") is None


def test_the_oldest_run_in_a_state(store: Store) -> None:
    """Of two queued runs it is the first; without a run in the state it is none."""
    for run in ("r-1", "r-2", "r-3"):
        store.runs.add(run_row(run))
    store.runs.set_state("r-1", "finished")
    oldest = store.runs.oldest("queued")
    assert oldest is not None
    assert oldest.id == "r-2"
    assert store.runs.oldest("running") is None


def test_the_first_model_starts_the_run(store: Store) -> None:
    """Version 0, the settings' blob and the run's state are saved together."""
    with_run(store)
    run = store.runs.get("r-1")
    assert run is not None
    assert (run.state, run.settings_sha256, run.settings_length) == ("running", digest("settings"), 8)
    assert store.models.last("r-1") == model_row(0) == store.models.get("r-1", 0)
    assert store.models.get("r-1", 1) is None


@pytest.mark.parametrize("state", ["RUNNING", "FROZEN"])
def test_a_failed_run_ends_its_open_round(store: Store, state: str) -> None:
    """Its update is no longer needed and its open leases are cancelled; leases that have ended stay as they are."""
    with_update(store)
    if state == "FROZEN":
        store.rounds.freeze("r-1", 1, 1, "hash")
    store.runs.fail("r-1", "crashed: why")
    run = store.runs.get("r-1")
    assert run is not None
    assert (run.state, run.reason) == ("failed", "crashed: why")
    assert [(r.state, r.reason) for r in store.rounds.all("r-1")] == [("ABANDONED", "crashed: why")]
    assert [lease.state for lease in store.leases.of_attempt("r-1", 1, 1)] == ["stored", "cancelled"]
    assert not store.blob_references.is_needed(update_row().sha256, 2)


def test_a_removed_run_leaves_nothing(store: Store) -> None:
    """Its rows are gone and their numbers are free again; other runs stay; an unknown run is no error."""
    with_update(store)
    store.traffic.add("r-1", {"a": (1, 2)})
    store.runs.save_device_info("r-1", "a", {})
    store.runs.add(run_row("r-2"))
    store.runs.start(model_row(0, "r-2"), digest("others"), 8)
    store.runs.remove("r-1")
    store.runs.remove("nobody")
    assert [run.id for run in store.runs.all()] == ["r-2"]
    queries = (
        store.models.all,
        store.rounds.all,
        store.evaluations.all,
        store.traffic.by_device,
        store.runs.device_info,
        store.updates.newest,
    )
    assert [len(query("r-1")) for query in queries] == [0] * 6
    assert (store.leases.get("lease-1"), store.updates.of_lease("lease-1"), store.leases.next_issue()) == (
        None,
        None,
        1,
    )
    assert store.blob_references.needed(2) == {digest("others"), model_row(0, "r-2").sha256}
    with_update(store)
    assert [run.id for run in store.runs.all()] == ["r-2", "r-1"]


def test_the_first_device_info_stays(store: Store) -> None:
    """Sorted by name, each run for itself."""
    with_run(store)
    store.runs.save_device_info("r-1", "b", {"cpu": "arm", "cores": [1, 2]})
    store.runs.save_device_info("r-1", "b", {"cpu": "x86"})
    store.runs.save_device_info("r-1", "a", {})
    assert list(store.runs.device_info("r-1").items()) == [("a", {}), ("b", {"cpu": "arm", "cores": [1, 2]})]
    assert store.runs.device_info("r-2") == {}
