"""Assignments for worker processes, as a daemon writes them, and what the workers leave behind."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edge_client.client.template import Template, TemplateError
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.models import registry
from edge_client.records import Report, from_map, to_map
from edge_client.wire.tensors import ContainerReader, write_container
from edge_client.worker import exit_codes

CLASSES = [str(digit) for digit in range(10)]
DIGITS = {"source": "digits", "partition": "iid", "part": [0, 4]}  # 450 samples: 360 to train on, 90 to test


def make_work(folder: Path, *, run: dict[str, Any] | None = None, **order: Any) -> Path:
    """A work directory as a daemon makes it."""
    folder.mkdir(parents=True)
    table = {"name": "t", "model": {"name": "small-cnn", "input": [1, 8, 8]}, "classes": CLASSES, **(run or {})}
    plain = parse_table(RunFile, table, source="test")
    (folder / "run.json").write_text(json.dumps(to_map(plain)))
    torch.manual_seed(0)
    section = plain.model
    assert section is not None
    if section.name in registry.names():
        model: nn.Module = registry.build(
            section.name, input_shape=section.input, num_classes=10, options=section.options
        )
    else:
        model = nn.Linear(1, 1)
    state = model.state_dict()
    rows = [(f"model/{name}", "fp32", tuple(tensor.shape)) for name, tensor in state.items()]
    write_container(folder / "model.bin", {}, rows, state.values())
    base = {
        "lease": "l1",
        "run": "t-1",
        "round": 3,
        "num_rounds": 9,
        "train": True,
        "evaluate": True,
        "seed": 5,
        "learning_rate": 0.1,
        "budget_bytes": 10**10,
        "device": "d1",
        "parts": {"run": str(folder / "run.json"), "model": str(folder / "model.bin")},
        "device_file": {"data": DIGITS},
        "method_state": str(folder / "state"),
    }
    (folder / "order.json").write_text(json.dumps(base | order))
    return folder


@functools.cache
def _template() -> Template:
    """A process that has loaded torch, once for all tests of this process."""
    template = Template()
    atexit.register(template.end)
    while not template.is_ready:
        assert select.select([template.fd], [], [], 120)[0]
        template.read()
        assert not template.has_ended
    return template


def fork_worker(work: Path) -> int:
    """Run to the end as daemons do it: in a fork of a process that has loaded torch; returns the exit code.

    One that has to measure the model first does it in a process of its own; so does one whose fork takes too long.
    """
    reading, writing = os.pipe()
    try:
        with (work / "stderr").open("w") as log:
            worker = _template().fork(work, progress=writing, log_file=log.fileno())
        code = worker.wait(120)
    except TemplateError:
        return run_worker(work)
    finally:
        os.close(reading)
        os.close(writing)
    if code != exit_codes.NOT_AS_FORK:
        return code
    (work / "error.json").unlink()
    return run_worker(work)


def run_worker(work: Path, **environment: str) -> int:
    """Run to the end in a process of its own, with these variables; returns the exit code (negative: the signal)."""
    command = [sys.executable, "-m", "edge_client.worker.process", str(work)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=300
    )
    (work / "stderr").write_text(done.stderr)
    return done.returncode


def read_update(work: Path) -> tuple[Report, dict[str, Tensor]]:
    """The update, after checking it against its manifest."""
    data = (work / "update.bin").read_bytes()
    manifest = json.loads((work / "update.json").read_text())
    with ContainerReader(work / "update.bin") as reader:
        report = from_map(Report, reader.header.meta)
        tensors = {name: reader.tensor(name) for name in reader.names()}
    expected = {"sha256": hashlib.sha256(data).hexdigest(), "length": len(data), "num_samples": report.num_samples}
    assert manifest == expected
    return report, tensors


def read_error(work: Path) -> dict[str, str]:
    """The reason that a worker gave."""
    assert not (work / "update.json").exists()
    reason: dict[str, str] = json.loads((work / "error.json").read_text())
    return reason


def npz_images(folder: Path) -> dict[str, Any]:
    """600 random images of 3x32x32 that stay on disk."""
    rng = np.random.default_rng(1)
    np.savez(folder / "c.npz", x=rng.integers(0, 256, (600, 3, 32, 32), dtype=np.uint8), y=rng.integers(0, 10, 600))
    return {"data": {"source": "npz", "train": str(folder / "c.npz")}}


def image_run(batch: int) -> dict[str, Any]:
    """Two steps of small-cnn on them."""
    return {"model": {"name": "small-cnn", "input": [3, 32, 32]}, "train": {"batch": batch, "max_steps": 2}}


def change_order(work: Path, **changes: Any) -> Path:
    """Change the order of a work directory."""
    order = json.loads((work / "order.json").read_text())
    (work / "order.json").write_text(json.dumps(order | changes))
    return work


TASK = """\
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from edge_client import Task

class Squares(Dataset):
    classes = ["links", "rechts"]  # the device's own names, in the device's own order
    def __len__(self):
        return 40
    def __getitem__(self, index):
        x = torch.full((1, 2, 2), 0.1)
        x[0, 0, index % 2] = 1.0 + torch.rand(()).item() + np.random.random()
        return x, index % 2

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem, self.head = nn.Flatten(), nn.Linear(4, num_classes)
    def forward(self, x):
        return self.head(self.stem(x))

def train_data(device):
    assert (device.name, device.classes, device.labels["line"]) == ("d1", ("right", "up", "left"), "a")
    return Squares()

task = Task(model=Net, train_data=train_data, units=["stem", "head"])
"""


def make_task_work(folder: Path, text: str = TASK, *, sha256: str = "", **device: Any) -> Path:
    """A work directory for a run of the task, which lies in the folder's parent."""
    work = make_work(folder)
    path = folder.parent / f"{folder.name}.py"
    path.write_text(text)
    task = {"name": "squares", "sha256": sha256 or hashlib.sha256(text.encode()).hexdigest()}
    table = {"name": "t", "task": task, "classes": ["right", "up", "left"], "train": {"epochs": 10, "batch": 8}}
    (work / "run.json").write_text(json.dumps(to_map(parse_table(RunFile, table, source="test"))))
    values = {"model/head.weight": torch.zeros(3, 4), "model/head.bias": torch.zeros(3)}
    rows = [(name, "fp32", tuple(value.shape)) for name, value in values.items()]
    write_container(work / "model.bin", {}, rows, values.values())
    base = {
        "tasks": {"squares": f"{path}:task"},
        "rename": {"links": "left", "rechts": "right"},
        "labels": {"line": "a"},
    }
    return change_order(work, device_file=base | device)
