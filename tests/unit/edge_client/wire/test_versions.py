"""Clients of earlier versions are understood: what each of them says was recorded at its release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.fleet.roster import Roster
from coordinator.store.rows import DeviceRow
from edge_client import __version__
from edge_client.records import to_map
from edge_client.wire.messages import Hello, Welcome, context_down, context_up, open_message

RECORDED = sorted((Path(__file__).parents[3] / "versions").glob("*.json"))
KEY = bytes(range(32))
FRAMES = [(path.stem, entry) for path in RECORDED for entry in json.loads(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("version", "entry"), FRAMES, ids=[f"{v}-{entry['kind']}" for v, entry in FRAMES])
def test_what_a_client_of_that_version_says_means_the_same(version: str, entry: dict[str, Any]) -> None:
    """Fields that came later have their defaults; a new one that is required would lock those devices out."""
    message = open_message(bytes.fromhex(entry["frame"]), key=KEY, context=context_up("fed", "d")).message
    assert type(message).__name__ == entry["kind"]
    now = json.loads(json.dumps(to_map(message)))
    assert {key: now[key] for key in entry["said"]} == entry["said"]


@pytest.mark.parametrize("version", [path.stem for path in RECORDED])
def test_a_client_of_that_version_is_let_in_and_known_by_it(version: str) -> None:
    """Its hello is answered with a welcome, and `device list` has its version to mark; it is known what it can do."""
    (entry,) = (e for v, e in FRAMES if v == version and e["kind"] == "Hello")
    hello = bytes.fromhex(entry["frame"])
    device = DeviceRow(name="d", key=KEY.hex(), password="p" * 20)
    roster = Roster("fed", [device], epoch=1, heartbeat_s=10.0)
    message, answer = roster.receive("d", hello, 0.0)
    assert isinstance(message, Hello)
    assert answer is not None
    assert isinstance(open_message(answer, key=KEY, context=context_down("fed", "d")).message, Welcome)
    present = roster.presence("d")
    assert present is not None
    assert present.client == version
    assert present.deploys == entry["said"].get("deploys", False)


def test_this_version_is_recorded() -> None:
    """`python tests/versions/make.py` does it, at a release."""
    assert __version__ in [path.stem for path in RECORDED]
