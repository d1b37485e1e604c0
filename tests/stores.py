"""Stores for tests: filled step by step, and compared by everything that they return."""

from __future__ import annotations

from rows import digest, evaluation_row, lease_row, model_row, round_row, run_row, update_row

from coordinator.store.base import Store


def with_run(store: Store) -> Store:
    """Add the run r-1, started, with version 0."""
    store.runs.add(run_row())
    store.runs.start(model_row(0), digest("settings"), 8)
    return store


def with_round(store: Store) -> Store:
    """Add r-1 in its first round: lease-1 lets a train, lease-2 lets b evaluate."""
    with_run(store).rounds.open(round_row(), [lease_row(1, "a"), lease_row(2, "b", train=False)])
    return store


def with_update(store: Store) -> Store:
    """Add r-1 in its first round, with the update and the evaluation of a."""
    with_round(store).updates.save(update_row(), evaluation_row(), "lease-1")
    return store


def everything_in(store: Store) -> list[object]:
    """All that a store returns about r-1 and its first round, for comparing."""
    return [
        store.devices.all(),
        store.page_access.tokens(),
        store.runs.all(),
        store.models.all("r-1"),
        store.models.parts("r-1"),
        store.rounds.all("r-1"),
        store.leases.of_attempt("r-1", 1, 1),
        store.updates.of_attempt("r-1", 1, 1),
        store.evaluations.all("r-1"),
        store.traffic.by_device("r-1"),
        store.models.scores("r-1"),
        store.rounds.left_out("r-1"),
        store.runs.device_info("r-1"),
        store.leases.device_failures("b", 9),
        store.leases.run_failures("r-1", 9),
        store.updates.newest("r-1"),
        store.blob_references.needed(1),
        store.settings.get("k"),
        store.leases.next_issue(),
        store.deployments.all(),
    ]
