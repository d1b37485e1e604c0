"""What a method remembers from round to round, as files of a run's state folder."""

from __future__ import annotations

from pathlib import Path

import torch

from edge_client.worker.method_state import read_state, write_state


def test_method_state_is_written_as_next_and_read_as_current(tmp_path: Path) -> None:
    """The daemon promotes it; an empty state leaves nothing, not even an older `next`."""
    folder = tmp_path / "state"
    state = {"c/head.bias": torch.tensor([1.5, -2.0]), "steps": torch.tensor(7)}
    write_state(folder, state)
    assert read_state(folder) == {}
    (folder / "next").rename(folder / "current")
    again = read_state(folder)
    assert all(torch.equal(again[name], state[name]) for name in state)
    write_state(folder, state)
    write_state(folder, {})
    assert sorted(path.name for path in folder.iterdir()) == ["current"]


def test_the_state_of_another_slice_is_not_used(tmp_path: Path) -> None:
    """Its tensors have other shapes; state of the whole model is one without a slice."""
    write_state(tmp_path, {"c": torch.ones(2)}, "width:1/2")
    (tmp_path / "next").rename(tmp_path / "current")
    assert read_state(tmp_path) == {}
    assert list(read_state(tmp_path, "width:1/2")) == ["c"]


def test_the_state_of_the_newest_stored_update_goes_before_the_last_that_counted(tmp_path: Path) -> None:
    """Whether the stored one counted is not known yet; if it does not, the daemon removes it before the next worker."""
    for value, name in ((1.0, "current"), (2.0, "stored-l1")):
        write_state(tmp_path, {"c": torch.tensor([value])})
        (tmp_path / "next").rename(tmp_path / name)
    assert read_state(tmp_path)["c"].item() == 2.0
