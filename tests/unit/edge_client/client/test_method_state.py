"""What a method keeps on a device counts exactly if its update does."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client import durable
from edge_client.client.method_state import count_method_state, settle_method_state


def test_the_methods_state_is_kept_only_for_what_was_received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`next` is kept with its lease for good, or is dropped; `current` waits, and without `next` nothing changes."""
    run = tmp_path / "r-1"
    run.mkdir()
    for name, text in (("current", "old"), ("next", "new")):
        (run / name).write_text(text)
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync_dir", synced.append)
    settle_method_state(tmp_path, "l1", accepted=True)
    settle_method_state(tmp_path, "l1", accepted=True)
    assert {entry.name: entry.read_text() for entry in run.iterdir()} == {"current": "old", "stored-l1": "new"}
    assert synced == [run]
    (run / "next").touch()
    settle_method_state(tmp_path, "l2", accepted=False)
    assert {entry.name for entry in run.iterdir()} == {"current", "stored-l1"}


@pytest.mark.parametrize(("counted", "kept"), [("l1", "one"), ("l2", "two"), ("l0", "old"), (None, "old")])
def test_the_methods_state_is_that_of_the_update_that_went_into_a_model(
    tmp_path: Path, counted: str | None, kept: str
) -> None:
    """After the updates of two leases were received, one of them counts, or the round of both was abandoned.

    Two are there if a power cut undid the rename of the first: it may still be the one that counts.
    """
    for name, text in (("current", "old"), ("stored-l1", "one"), ("stored-l2", "two")):
        (tmp_path / name).write_text(text)
    for _ in range(2):  # again after a restart
        count_method_state(tmp_path, counted)
        assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {"current": kept}
    count_method_state(tmp_path / "none", counted)


def test_the_methods_state_of_an_update_in_hand_waits(tmp_path: Path) -> None:
    """Its receipt came, and the client died before it forgot the lease: the receipt comes again."""
    (tmp_path / "stored-l2").write_text("two")
    count_method_state(tmp_path, "l1", in_hand="l2")
    assert [entry.name for entry in tmp_path.iterdir()] == ["stored-l2"]
