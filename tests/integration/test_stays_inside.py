"""Devices stay inside their memory: wrong predictions and falling memory end in smaller plans and finished rounds.

Real broker, coordinator, daemon and workers. small-cnn on 600 images of 3x32x32 trains with about 0.42 MB per sample of
a microbatch, above a process of 160 MB of private memory.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from fleet import Fleet, Json

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited and read as on Linux")

_PATIENCE_S = 300  # a calibration and several workers, each of which loads torch, on a machine with much else to do


def _run(*, batch: int, steps: int) -> RunFile:
    """One round."""
    table = {
        "name": "test",
        "model": {"name": "small-cnn", "input": [3, 32, 32]},
        "classes": [str(number) for number in range(10)],
        "train": {"batch": batch, "max-steps": steps},
        "stop": {"rounds": 1},
        "evaluate": {"every": 0},
    }
    return parse_table(RunFile, table, source="test")


def _images(folder: Path) -> str:
    rng = np.random.default_rng(1)
    np.savez(folder / "c.npz", x=rng.integers(0, 256, (600, 3, 32, 32), dtype=np.uint8), y=rng.integers(0, 10, 600))
    return f'{{ source = "npz", train = "{folder / "c.npz"}", test-fraction = 0 }}'


def _device(shown: Json) -> tuple[Json, int]:
    """The only device of a finished run, and the microbatch of its last plan."""
    assert shown["state"] == "finished", shown["reason"]
    (device,) = shown["devices"]
    match = re.search(r"microbatch (\d+)", device["plan"])
    assert match is not None
    return device, int(match[1])


def test_a_halved_prediction_is_noticed_before_the_round_depends_on_it_and_remembered(tmp_path: Path) -> None:
    """Budget 240 MB. Halved twice, 512 samples at once are predicted to fit and need 370 MB; 128 need 215 MB.

    The rehearsal notices, and no worker goes over the budget. The daemon is killed before the second run, whose worker
    finds on the disk what the first one measured: it takes the same plan without another rehearsal.
    """
    faults = {"FEDFIT_FAULT": "halve:planning.predicted,halve:planning.predicted:2"}
    budget = 240 * 10**6
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator()
        fleet.add_devices("a")
        fleet.start_device("a", faults, memory="240MB", data=_images(tmp_path))
        first, microbatch = _device(fleet.wait_finished(fleet.start_run(_run(batch=512, steps=2)), _PATIENCE_S))
        assert 8 <= microbatch < 512
        assert re.search(r"plan: full, microbatch \d+ needs .* are free; trying full, microbatch \d+", fleet.log("a"))
        assert first["peak_bytes"] <= budget == first["budget_bytes"]
        assert first["inside_budget"]
        fleet.kill("a")
        second, _ = _device(fleet.wait_finished(fleet.start_run(_run(batch=512, steps=2)), _PATIENCE_S))
    assert fleet.log("a").count("the worker failed: over_budget") == 0
    assert (second["plan"], second["replans"]) == (first["plan"], 0)
    assert second["peak_bytes"] <= budget
    assert fleet.unexpected == []


def _meminfo(root: Path, available_mb: int) -> None:
    """A system of 1 GB."""
    (root / "proc").mkdir(parents=True, exist_ok=True)
    temporary = root / "proc/.meminfo"
    temporary.write_text(f"MemTotal:  1000000 kB\nMemAvailable:  {available_mb * 1000} kB\n")
    temporary.replace(root / "proc/meminfo")


def test_falling_memory_shrinks_the_plan_in_the_middle_of_a_round(tmp_path: Path) -> None:
    """711 MB are available: budget 0.8 x (728 - 128) = 480 MB. Then 230 (236 million bytes) are.

    With about 165 MB of the worker's own that is a budget of 218 MB (150 to 200 MB: 206 to 246): not enough for the 270
    that 256 samples at once need, but for 195 (64). The worker waits after its first step until the daemon has told it.
    """
    root, stopped = tmp_path / "root", tmp_path / "faults"
    faults = {"FEDFIT_FAULT": "stop:worker.train.step", "FEDFIT_FAULT_LOG": str(stopped)}
    _meminfo(root, 711)
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator()
        fleet.add_devices("a")
        fleet.start_device("a", faults, memory="auto", data=_images(tmp_path), root=root)
        run = fleet.start_run(_run(batch=256, steps=3))
        fleet.wait_until(stopped.exists, _PATIENCE_S, "the worker has done a step")
        (work,) = (tmp_path / "a/state/work").iterdir()
        before = json.loads((work / "plan.json").read_text())
        _meminfo(root, 230)
        fleet.wait_until((work / "budget.json").exists, _PATIENCE_S, "the worker is told")
        told = json.loads((work / "budget.json").read_text())["budget_bytes"]
        (pid,) = re.findall(r"worker (\d+) started", fleet.log("a"))
        os.kill(int(pid), signal.SIGCONT)
        device, microbatch = _device(fleet.wait_finished(run, _PATIENCE_S))
    assert before["budget_bytes"] == before["plan"]["budget_bytes"] == int(0.8 * (711 * 1_024_000 - 128 * 10**6))
    assert microbatch < before["plan"]["microbatch"] == 256
    assert (device["budget_bytes"], device["replans"]) == (told, 1)
    assert device["peak_bytes"] <= told
    assert device["inside_budget"]
    assert fleet.unexpected == []
