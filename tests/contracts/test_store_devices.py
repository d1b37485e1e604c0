"""Contract of `Devices`: enrolling, labelling and removing devices."""

from __future__ import annotations

import pytest
from rows import deployment_row, device_row, digest

from coordinator.store.base import Store
from edge_client.errors import ConflictError, NoSuchNameError


def test_devices_are_added_replaced_and_removed(store: Store) -> None:
    """A name can be taken once; an error about an unknown name lists the known ones."""
    store.devices.add(device_row("b", labels={"site": "north"}))
    store.devices.add(device_row("a"))
    assert store.devices.all() == [device_row("a"), device_row("b", labels={"site": "north"})]
    with pytest.raises(ConflictError, match="exists already"):
        store.devices.add(device_row("a", key=digest("new")))
    store.devices.add(device_row("a", key=digest("new")), replace=True)
    assert store.devices.all()[0].key == digest("new")
    assert store.devices.get("a") == device_row("a", key=digest("new"))
    store.devices.remove("a")
    assert store.devices.get("a") is None
    with pytest.raises(NoSuchNameError, match="known: b"):
        store.devices.remove("a")


def test_labels_are_replaced_as_a_whole(store: Store) -> None:
    """Labels that the new ones do not name are gone; an unknown device is an error."""
    store.devices.add(device_row("a", labels={"line": "a", "site": "north"}))
    store.devices.set_labels("a", {"line": "b"})
    assert store.devices.all()[0].labels == {"line": "b"}
    with pytest.raises(NoSuchNameError, match="known: a"):
        store.devices.set_labels("b", {})


def test_removing_a_device_removes_its_deployments(store: Store) -> None:
    """The blob that only it used is no longer needed."""
    store.devices.add(device_row("a"), device_row("b"))
    store.deployments.add([deployment_row(1, "a"), deployment_row(1, "b", sha256=digest("half"))])
    store.devices.remove("a")
    assert store.blob_references.needed(1) == {digest("half")}
