"""There is one snapshot at a time, and a killed backup leaves none behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.state import STATE_KIND, STATE_VERSION
from coordinator.store import backup, snapshot
from edge_client import durable
from edge_client.errors import ConflictError


def test_one_backup_at_a_time(tmp_path: Path) -> None:
    """A second backup is refused; a start meanwhile leaves the snapshot alone, and a later start removes it."""
    state_dir = tmp_path / "state"
    os.close(durable.claim_state_dir(state_dir, kind=STATE_KIND, version=STATE_VERSION))
    folder = snapshot.folder_of(state_dir)
    folder.mkdir()
    with snapshot.exclusive(state_dir):
        with pytest.raises(ConflictError, match="another backup"):
            backup.make_backup(state_dir, tmp_path / "b")
        snapshot.remove_stale(state_dir)
        assert folder.exists()
    snapshot.remove_stale(state_dir)
    assert not folder.exists()
