"""docs/tutorials/own-model.md is true: its task, as it stands, is built on the server and trained in a worker."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aggregator_jobs import do_job
from PIL import Image
from worker_runs import fork_worker, make_work, read_update

from edge_client import worker
from edge_client.config.device_file import load_device_file
from edge_client.config.run_file import load_run_file
from edge_client.config.task_files import task_sha256
from edge_client.records import to_map

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (Path(__file__).parents[2] / "docs/tutorials/own-model.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    """A file that the page shows."""
    (found,) = re.findall(rf"<!-- file: {re.escape(name)} -->\n```[a-z]+\n(.*?)```\n", PAGE, re.DOTALL)
    return str(found)


def images(folder: Path, counts: dict[str, int]) -> None:
    rng = np.random.default_rng(7)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(rng.integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(folder / name / f"{number}.png")


def test_the_task_of_the_page_is_trained_from_its_own_files(tmp_path: Path) -> None:
    """Only the two paths are this test's. Classes ok, kratzer (renamed to scratch); 12 + 8 images, 4 + 2 for tests."""
    images(tmp_path / "train", {"kratzer": 8, "ok": 12})
    images(tmp_path / "test", {"kratzer": 2, "ok": 4})
    (tmp_path / "defects.py").write_text(block("defects.py"))
    (tmp_path / "run.toml").write_text(block("run.toml"))
    device = block("device.toml").replace("/data/defects", str(tmp_path)).replace("/opt/fedfit/tasks", str(tmp_path))
    (tmp_path / "device.toml").write_text(device)
    run: dict[str, Any] = to_map(load_run_file(tmp_path / "run.toml"))
    run["task"]["sha256"] = task_sha256(tmp_path / "defects.py")
    work = make_work(tmp_path / "w", device_file=to_map(load_device_file(tmp_path / "device.toml")))
    (work / "run.json").write_text(json.dumps(run))
    job = {"job": "init", "run": run, "task": str(tmp_path / "defects.py"), "out": str(work / "model.bin")}
    assert do_job(job)["ok"]
    assert fork_worker(work) == 0, (work / "stderr").read_text()
    report, tensors = read_update(work)
    assert (report.num_samples, report.num_test) == (20, 6)
    assert tensors["evaluation/confusion"].sum(dim=1).tolist() == [4, 2, 0]
    assert tensors["model/2.1.weight"].shape == torch.Size([3, 512])


def test_the_example_is_short_and_its_files_are_toml() -> None:
    """Twenty lines of code are what a task takes."""
    code = [line for line in block("defects.py").splitlines() if line.strip()]
    assert len(code) <= 20
    assert tomllib.loads(block("device.toml")).keys() == {"data", "rename", "tasks"}


SOURCES = [path.read_text(encoding="utf-8") for path in Path(worker.__path__[0]).glob("*.py")]
CODE = re.compile(r'"((?:task|bad|no|unknown|nothing|not)_[a-z]+)"')
CODES = sorted({code for text in SOURCES for code in CODE.findall(text)})


@pytest.mark.parametrize("code", CODES)
def test_every_reason_to_decline_is_on_the_page(code: str) -> None:
    """Those of models and methods that a device does not know concern no task."""
    assert f"`{code}`" in PAGE or code in ("unknown_method", "unknown_model", "bad_method")
