"""Tensors that stay in their file."""

from __future__ import annotations

from pathlib import Path

import torch

from edge_client.wire.tensors import write_container
from edge_client.worker.stored_tensors import StoredTensors


def _write(path: Path) -> None:
    values = {"model/w": torch.tensor([1.0]), "extra/c": torch.tensor([2.0]), "other": torch.tensor([3.0])}
    rows = [(name, "fp32", tuple(value.shape)) for name, value in values.items()]
    write_container(path, {}, rows, values.values())


def test_a_prefix_is_left_out_of_the_names_and_a_second_one_is_not(tmp_path: Path) -> None:
    """Three tensors: all of them, those of the model, and those of the model beside the method's own."""
    _write(tmp_path / "m.bin")
    assert list(StoredTensors(tmp_path / "m.bin")) == ["model/w", "extra/c", "other"]
    assert list(StoredTensors(tmp_path / "m.bin", "model/")) == ["w"]
    both = StoredTensors(tmp_path / "m.bin", "model/", also="extra/")
    assert (list(both), len(both), "other" in both) == (["w", "extra/c"], 2, False)
    assert both["extra/c"].item() == 2.0


def test_each_read_is_a_new_tensor(tmp_path: Path) -> None:
    """A method may change what it was given."""
    _write(tmp_path / "m.bin")
    stored = StoredTensors(tmp_path / "m.bin", "model/")
    stored["w"].zero_()
    assert stored["w"].item() == 1.0


def test_a_file_that_is_not_there_has_no_tensors(tmp_path: Path) -> None:
    """A method's state before its first round."""
    assert dict(StoredTensors(tmp_path / "none")) == {}
