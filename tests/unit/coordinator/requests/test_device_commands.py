"""Labels as people type them, and rows with fresh secrets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rows import device_row

from coordinator.cli import devices as cli_devices
from coordinator.control_messages import AddDevices, DeviceLabels, LabelDevice, RemovedDevices, RemoveDevices
from coordinator.requests import devices as device_commands
from coordinator.store.sqlite import SqliteStore
from edge_client import __version__
from edge_client.errors import ConflictError, InputError, MachineError, NoSuchNameError


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[device_commands.StoredDevices]:
    """A coordinator that does not run, with the device a."""
    store = SqliteStore(tmp_path / "state.db")
    store.settings.federation("fed")
    store.settings.set("brokers", "mqtts://h:8883\nmqtts://g:8883")
    store.devices.add(device_row("a", labels={"line": "a", "site": "x"}))
    yield device_commands.StoredDevices(store)
    store.close()


def test_labels_are_put_and_dropped() -> None:
    """`k=v` and `k-`; a value may have an equals sign; the last word counts."""
    put, drop = cli_devices.parse_labels(["line=b", "cmd=a=b", "site-", "line=c", "empty="], may_drop=True)
    assert (put, drop) == ({"line": "c", "cmd": "a=b", "empty": ""}, ["site"])


@pytest.mark.parametrize("word", ["line", "=a", "a b=c", "-", "k-=v", f"{'k' * 65}=v", f"k={'v' * 129}", "ä=b"])
def test_what_is_no_label_is_refused(word: str) -> None:
    """Neither a key and a value, nor a key to drop."""
    with pytest.raises(InputError, match="label"):
        cli_devices.parse_labels([word], may_drop=True)
    with pytest.raises(InputError, match="label"):
        cli_devices.parse_labels([word if "=" in word else f"{word}-"], may_drop=False)


def test_more_labels_than_travel_are_refused() -> None:
    """64 at most, those that are there already included."""
    given = {f"k{i}": "v" for i in range(64)}
    assert device_commands.changed_labels(given, {"k0": "w"}, ["k1"])["k0"] == "w"
    with pytest.raises(InputError, match="at most 64"):
        device_commands.changed_labels(given, {"one": "more"}, [])


def test_fresh_secrets_keep_the_labels_unless_others_are_given(stored: device_commands.StoredDevices) -> None:
    """Key and password differ each time."""
    old = device_row("a")
    (bundle,) = stored.add(AddDevices(names=("a", "a"), replace=True)).bundles
    assert bundle.key != old.key
    assert bundle.password != old.password
    assert bundle.brokers == ("mqtts://h:8883", "mqtts://g:8883")
    assert stored.label(LabelDevice(name="a", put={})) == DeviceLabels(id="a", labels={"line": "a", "site": "x"})
    stored.add(AddDevices(names=("a",), labels={"line": "z"}, replace=True))
    assert stored.label(LabelDevice(name="a", put={})) == DeviceLabels(id="a", labels={"line": "z"})


def test_add_is_for_new_names_and_replace_for_known_ones(stored: device_commands.StoredDevices) -> None:
    """A mistyped name must not leave the old secrets valid, nor take an existing device's place."""
    with pytest.raises(ConflictError, match="--replace"):
        stored.add(AddDevices(names=("b", "a")))
    with pytest.raises(NoSuchNameError, match="known: a"):
        stored.add(AddDevices(names=("a", "b"), replace=True))
    with pytest.raises(NoSuchNameError, match="known: a"):
        stored.remove(RemoveDevices(names=("a", "b")))
    with pytest.raises(NoSuchNameError, match="known: a"):
        stored.label(LabelDevice(name="b", put={"x": "y"}))
    assert stored.remove(RemoveDevices(names=("a", "a"))) == RemovedDevices(removed=("a",), external=False)


def test_a_coordinator_that_never_served_adds_no_device(tmp_path: Path) -> None:
    """Nobody knows where a device would connect to; its bundle would be of no use, and its name taken."""
    store = SqliteStore(tmp_path / "state.db")
    store.settings.federation("fed")
    with pytest.raises(MachineError, match="never served: start it"):
        device_commands.StoredDevices(store).add(AddDevices(names=("a",)))
    assert store.devices.all() == []
    store.close()


def test_a_name_that_reads_as_an_option_is_refused() -> None:
    """`coordinator device remove -x` could not name it."""
    with pytest.raises(InputError, match="not as the first"):
        device_commands.new_device("-x")


@pytest.mark.parametrize(
    ("client", "told"),
    [
        (__version__, "same"),
        (f"{__version__}+local", "same"),
        ("0.0.9", "older"),
        ("999.0.0", "newer"),
        ("999.0", "newer"),
        ("", "unknown"),
        ("next", "unknown"),
    ],
)
def test_versions_of_clients_are_compared_with_the_coordinators(client: str, told: str) -> None:
    """By their numbers; what a client says may be anything."""
    assert device_commands.compare_versions(client) == told
