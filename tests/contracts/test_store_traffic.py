"""Contract of `Traffic`: totals for each run and device."""

from __future__ import annotations

from stores import with_run

from coordinator.store.base import Store


def test_traffic_adds_up(store: Store) -> None:
    """For each device, both ways: 1 + 10 bytes up and 2 + 20 down."""
    with_run(store)
    store.traffic.add("r-1", {"a": (1, 2), "b": (5, 0)})
    store.traffic.add("r-1", {"a": (10, 20)})
    assert store.traffic.by_device("r-1") == {"a": (11, 22), "b": (5, 0)}
