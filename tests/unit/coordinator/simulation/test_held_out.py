"""Shared samples of a simulation: kept out of the data that the devices have, if the run names none."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coordinator.simulation import data as simulation_data
from coordinator.simulation.run_options import Flags, combinations, complete
from edge_client.config.run_file import RunFile
from edge_client.data import openers
from edge_client.methods.shared_samples import load_public


def _resolved(*settings: str) -> RunFile:
    (combination,) = combinations(Flags(method="fedmd", devices=3, set=settings))
    return complete(combination, simulation_data.describe("digits", ""))


def test_a_fifth_of_the_data_is_shared_and_no_device_has_it(tmp_path: Path) -> None:
    """Of 1,438 digits (359 are for tests) 287 are shared; the three devices have the other 1,151, each once."""
    file = _resolved()
    assert file.method.parameters["public"] == "held-out:digits"
    prepared = simulation_data.prepare(file, tmp_path)
    assert sum(prepared.sizes) == 1438 - 287
    owner = np.load(prepared.parts)["train"]
    assert (owner == -1).sum() == 287
    values = load_public(f"npz:{prepared.shared}", file, 1000)
    train = openers.open_named(f"npz:{prepared.path}")
    rows, convert = train.rows(np.flatnonzero(owner == -1), (1, 8, 8))
    same = convert(rows.take(np.arange(287))).reshape(287, -1)
    assert np.array_equal(np.sort(values.numpy().reshape(287, -1), axis=0), np.sort(same, axis=0))


def test_shared_samples_that_are_named_are_taken_as_they_are(tmp_path: Path) -> None:
    """Then the devices have all of the data."""
    file = _resolved("public=digits")
    assert file.method.parameters["public"] == "digits"
    prepared = simulation_data.prepare(file, tmp_path)
    assert sum(prepared.sizes) == 1438
