"""Contract of `Settings`: the epoch, the federation's id and small settings."""

from __future__ import annotations

from coordinator.store.base import Store


def test_the_epoch_always_grows(store: Store) -> None:
    """It follows the wall clock, and grows by one when the clock stands still or was set back."""
    assert [store.settings.next_epoch(wall) for wall in (100, 100, 5, 200)] == [100, 101, 102, 200]


def test_the_federation_keeps_its_first_id(store: Store) -> None:
    """A second proposal is ignored."""
    assert store.settings.federation("first") == "first"
    assert store.settings.federation("second") == "first"


def test_a_setting_keeps_its_last_value(store: Store) -> None:
    """It is empty until it is set."""
    assert store.settings.get("k") == ""
    store.settings.set("k", "v")
    store.settings.set("k", "w")
    assert store.settings.get("k") == "w"
