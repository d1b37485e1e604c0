"""The data of a simulation, asked of the process that opens, copies and divides it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rows import run_file

from coordinator.simulation.data import describe, prepare
from edge_client.config.run_file import RunFile, SimulateSection
from edge_client.errors import InputError

_SAMPLES = {"x": np.arange(80, dtype=np.float32).reshape(20, 4), "y": np.arange(20) % 2}


@pytest.fixture
def samples(tmp_path: Path) -> str:
    """Twenty samples of four numbers in two classes, as a data source."""
    np.savez(tmp_path / "samples.npz", **_SAMPLES)
    return f"npz:{tmp_path / 'samples.npz'}"


def _run(samples: str, devices: int) -> RunFile:
    section = SimulateSection(data=samples, devices=devices)
    return replace(run_file(), classes=("0", "1"), simulate=section, model=None)


def test_shape_and_classes_are_those_of_the_file(samples: str) -> None:
    """As records: tuples, not the lists of JSON."""
    missing = describe(samples, "iid")
    assert (missing.shape, missing.classes) == ((4,), ("0", "1"))


def test_every_sample_belongs_to_one_device(samples: str, tmp_path: Path) -> None:
    """The file has no test set: a fifth of the twenty is kept for all, the devices share the other sixteen."""
    prepared = prepare(_run(samples, 3), tmp_path / "data")
    assert (len(prepared.sizes), sum(prepared.sizes), prepared.num_test) == (3, 16, 4)
    assert Path(prepared.path).exists()
    assert Path(prepared.parts).exists()


def test_what_is_wrong_with_the_data_has_its_own_error(samples: str, tmp_path: Path) -> None:
    """It comes through the pipe as the class that it was there: a file that is missing, more devices than samples."""
    with pytest.raises(InputError, match=r"nowhere\.npz"):
        describe("npz:/nowhere.npz", "iid")
    with pytest.raises(InputError, match="21"):
        prepare(_run(samples, 21), tmp_path / "data")
