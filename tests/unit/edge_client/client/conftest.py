"""The daemon in memory, for all tests of the client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from device_world import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A device's state directory and its coordinator; no turn waits."""
    monkeypatch.setattr("edge_client.client.daemon._IDLE_S", 0.0)
    new_world = World(tmp_path)
    yield new_world
    if new_world.daemon is not None:
        new_world.daemon.shut_down()
