"""The frozen updates as a fold reads them: absolute values by device, one open file at a time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from aggregator_jobs import (
    report_meta,
    save,
)

from coordinator.aggregation.frozen import FrozenSet, FrozenUpdate
from edge_client.errors import PayloadError


def test_a_frozen_set_gives_absolute_values_sorted_and_again(tmp_path: Path) -> None:
    """Weights as they are, a delta of 0.5 on a base of 2 as 2.5; an evaluation has no column; samples as stored."""
    base = save(tmp_path / "base", {"w": torch.tensor([2.0])})
    updates = [
        FrozenUpdate(
            device="c", path=save(tmp_path / "c", {"w": torch.tensor([0.5])}, meta=report_meta("delta")), num_samples=3
        ),
        FrozenUpdate(
            device="a", path=save(tmp_path / "a", {"w": torch.tensor([9.0])}, meta=report_meta("params")), num_samples=4
        ),
        FrozenUpdate(
            device="b",
            path=save(tmp_path / "b", {"evaluation/confusion": torch.zeros(1, 1).long()}, meta=report_meta("none", 0)),
            num_samples=0,
        ),
    ]
    frozen = FrozenSet(base, updates)
    assert [(h.device, h.num_samples) for h in frozen.headers] == [("a", 4), ("b", 0), ("c", 3)]
    for _ in range(2):
        assert [(h.device, float(x), where) for h, x, where in frozen.column("w")] == [
            ("a", 9.0, None),
            ("c", 2.5, None),
        ]


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors with /proc")
def test_a_frozen_set_of_many_updates_opens_one_file_at_a_time(tmp_path: Path) -> None:
    """300 updates read twice; while a column is half read, one descriptor more than before is the most."""
    path = save(tmp_path / "u", {"w": torch.tensor([1.0])}, meta=report_meta("params"))
    frozen = FrozenSet(path, [FrozenUpdate(device=f"d{i}", path=path, num_samples=1) for i in range(300)])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert max(len(os.listdir("/proc/self/fd")) for _ in frozen.column("w")) <= before + 1


def test_a_delta_that_does_not_fit_the_base_is_refused(tmp_path: Path) -> None:
    """Adding a [1] to a [2] would broadcast."""
    base = save(tmp_path / "base", {"w": torch.zeros(2)})
    bad = save(tmp_path / "u", {"w": torch.zeros(1)}, meta=report_meta("delta"))
    frozen = FrozenSet(base, [FrozenUpdate(device="a", path=bad, num_samples=1)])
    with pytest.raises(PayloadError, match="shape"):
        list(frozen.column("w"))


def test_one_device_twice_is_misuse(tmp_path: Path) -> None:
    """Exactly once, or the mean is wrong."""
    path = save(tmp_path / "u", {"w": torch.zeros(2)}, meta=report_meta("params"))
    with pytest.raises(ValueError, match="one update per device"):
        FrozenSet(path, [FrozenUpdate(device="a", path=path, num_samples=1)] * 2)
