"""Join bundles and the device's own identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rows import digest

from edge_client.client.identity import Bundle, join, load_identity, parse_bundle, read_bundle, write_bundle
from edge_client.errors import ConflictError, InputError, MachineError


def _bundle(**changes: Any) -> Bundle:
    fields = {"federation": "fed", "device": "a", "brokers": ("mqtts://h:8883",), "password": "p" * 20}
    return Bundle(**fields | {"key": digest("a")} | changes)


def test_a_bundle_is_read_as_it_was_written(tmp_path: Path) -> None:
    """For its owner only; the key is 32 bytes."""
    bundle = _bundle(ca="-----BEGIN CERTIFICATE-----\n")
    write_bundle(tmp_path / "b.json", bundle)
    assert read_bundle(tmp_path / "b.json") == bundle
    assert (tmp_path / "b.json").stat().st_mode & 0o777 == 0o600
    assert len(bundle.key_bytes()) == 32


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[" * 100_000,
        "1" * 5000,
        '{"fedfit": 2}',
        json.dumps({"federation": "a/b", "device": "a", "brokers": [], "password": "p" * 20, "key": "0" * 64}),
        json.dumps({"federation": "f", "device": "a", "brokers": [], "password": "short", "key": "0" * 64}),
        json.dumps({"federation": "f", "device": "a", "brokers": [], "password": "p" * 20, "key": "0" * 63}),
        *(
            json.dumps({"federation": "f", "device": "a", "brokers": brokers, "password": "p" * 20, "key": "0" * 64})
            for brokers in ([], ["mqtts://h:8883", "broker.example"], ["mqtt://h:port"], ["mqtts://[::1"])
        ),
    ],
    ids=range(13),
)
def test_what_is_no_bundle_is_refused_with_how_to_make_one(text: str) -> None:
    """Whatever the file holds, also JSON that Python itself gives up on."""
    with pytest.raises(InputError, match="coordinator device add"):
        parse_bundle(text, "file")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, and not text."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "binary"):
        with pytest.raises(InputError, match=name):
            read_bundle(tmp_path / name)


def test_a_device_file_may_wait_in_the_state_directory(tmp_path: Path) -> None:
    """Written before the device has joined; it stays as it is."""
    (tmp_path / "device.toml").write_text("labels = {}")
    join(tmp_path, _bundle())
    assert load_identity(tmp_path) == _bundle()
    assert (tmp_path / "device.toml").read_text() == "labels = {}"


def test_a_device_joins_once(tmp_path: Path) -> None:
    """The same bundle again, or a renewed one, is fine; another device's is not."""
    state = tmp_path / "state"
    with pytest.raises(InputError, match="has not joined"):
        load_identity(state)
    join(state, _bundle())
    join(state, _bundle())
    renewed = _bundle(key=digest("new"))
    join(state, renewed)
    assert load_identity(state) == renewed
    with pytest.raises(ConflictError, match="already belongs to device 'a'"):
        join(state, _bundle(device="b"))
    assert load_identity(state) == renewed
    assert (state / "identity").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["password", "key"])
def test_a_secret_with_a_slip_in_it_is_not_repeated(tmp_path: Path, name: str) -> None:
    """Screens and logs are read by others."""
    write_bundle(tmp_path / "b.json", _bundle())
    data = json.loads((tmp_path / "b.json").read_text())
    slip = data[name] + " "
    with pytest.raises(InputError, match=f"bundle.{name} does not match") as caught:
        parse_bundle(json.dumps({**data, name: slip}), "b.json")
    assert data[name] not in str(caught.value)


def test_a_state_directory_that_may_not_be_looked_at_is_told(tmp_path: Path) -> None:
    """As for one of another user, whose error a test as root cannot have."""
    with pytest.raises(MachineError, match=r"cannot look at .*File name too long; if it is another user's"):
        load_identity(tmp_path / ("x" * 300))
