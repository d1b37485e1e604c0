"""Models that are far too large for the budget never take memory: each test starts real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from worker_runs import (
    CLASSES,
    make_work,
    read_error,
)

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.records import to_map

_MEASURED = """
import sys
from edge_client.device import meter
from edge_client.worker import process
code = process.main(sys.argv[1:])
print(meter.peak_rss_bytes())
sys.exit(code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_a_model_far_beyond_the_budget_is_declined_before_it_is_built(tmp_path: Path) -> None:
    """Three layers of 16384 are 538 million parameters, 2.2 GB; the process stays below 300 MB, as any worker."""
    work = make_work(tmp_path / "w", budget_bytes=300_000_000)
    table = {"name": "t", "classes": CLASSES}
    table["model"] = {"name": "mlp", "input": [1, 8, 8], "hidden": [16384] * 3}
    (work / "run.json").write_text(json.dumps(to_map(parse_table(RunFile, table, source="test"))))
    assert _measured(work) == (76, True)
    assert read_error(work)["code"] == "nothing_fits"


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_a_sample_far_beyond_the_budget_ends_the_worker_before_the_devices_memory_ends(tmp_path: Path) -> None:
    """The first convolution of one sample puts out 32 x 4096 x 4096 floats, 2.1 GB; building the model runs it."""
    np.savez(tmp_path / "c.npz", x=np.zeros((5, 1, 4096, 4096), dtype=np.uint8), y=np.arange(5))
    work = make_work(tmp_path / "w", budget_bytes=300_000_000)
    work_run = {"name": "t", "classes": CLASSES, "model": {"name": "small-cnn", "input": [1, 4096, 4096]}}
    (work / "run.json").write_text(json.dumps(to_map(parse_table(RunFile, work_run, source="test"))))
    order = json.loads((work / "order.json").read_text())
    order["device_file"] = {"data": {"source": "npz", "train": str(tmp_path / "c.npz")}}
    (work / "order.json").write_text(json.dumps(order))
    assert _measured(work)[0] == 75


def _measured(work: Path) -> tuple[int, bool]:
    """The exit code, and whether the worker's memory stayed below 300 MB."""
    command = [sys.executable, "-c", _MEASURED, str(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, int(done.stdout) < 300_000_000
