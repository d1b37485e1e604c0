"""This device's samples for an assignment, opened in real workers with tight budgets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from worker_runs import (
    image_run,
    make_work,
    read_update,
    run_worker,
)


def test_data_that_is_larger_than_the_budget_is_not_unpacked_first(tmp_path: Path) -> None:
    """300 MB of zeros in a small file, on top of a warm process, and a budget of 350 MB: the device never has both."""
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros((30_000, 100, 100), np.uint8), y=np.zeros(30_000, np.int64))
    data = {"source": "npz", "train": str(tmp_path / "d.npz")}
    model = {"model": {"name": "small-cnn", "input": [1, 100, 100]}}
    work = make_work(tmp_path / "w", run=model, device_file={"data": data}, budget_bytes=350 * 10**6)
    # started by a small process: the peak of a forked child begins with its parent's size
    between = (
        "import resource, subprocess, sys\ncode = subprocess.call(sys.argv[1:], stderr=subprocess.DEVNULL)\n"
        "print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", between, sys.executable, "-m", "edge_client.worker.process", str(work)]
    code, peak_kb = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert code == "76"
    told = json.loads((work / "error.json").read_text())
    assert (told["code"], told["detail"].partition(";")[0]) == (
        "nothing_fits",
        "its data alone needs more than the budget of 350 MB",
    )
    assert int(peak_kb) * 1024 < 400 * 10**6


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_an_image_folder_larger_than_the_budget_is_trained_inside_it(tmp_path: Path) -> None:
    """300 PNG files of 1000x1000 pixels: 1.2 GB decoded, budget 310 MB; the peak stays below what was predicted."""
    for name in ("0", "1"):
        (tmp_path / "images" / name).mkdir(parents=True)
    Image.new("RGB", (1000, 1000), (200, 100, 50)).save(tmp_path / "one.png")
    for number in range(300):
        os.link(tmp_path / "one.png", tmp_path / "images" / str(number % 2) / f"{number}.png")
    device = {"data": {"source": "image-folder", "train": str(tmp_path / "images")}}
    work = make_work(tmp_path / "w", run=image_run(16), device_file=device, budget_bytes=310_000_000)
    assert run_worker(work) == 0, (work / "stderr").read_text()
    report, _ = read_update(work)
    assert report.plan is not None
    assert (report.num_samples, report.num_test) == (240, 60)
    assert report.private_peak_bytes <= report.plan.private_predicted_bytes <= 310_000_000
