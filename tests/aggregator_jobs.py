"""The aggregator's jobs in the process of the test, through the codec of its pipe, and the files that they need."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from coordinator.aggregation import process
from coordinator.aggregation.jobs import answer_line
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.records import to_map
from edge_client.wire.tensors import ContainerReader, codec_for, write_container

__all__ = [
    "INT8",
    "RUN",
    "SLICED",
    "check",
    "deep_run",
    "do_job",
    "evaluate",
    "fold_job",
    "init",
    "load",
    "report_meta",
    "save",
    "task_run",
]

RUN: dict[str, Any] = to_map(
    parse_table(
        RunFile,
        {"name": "t", "seed": 5, "model": {"name": "mlp", "input": [2], "hidden": [3]}, "classes": ["a", "b"]},
        source="test",
    )
)

INT8 = RUN | {"rounds": RUN["rounds"] | {"codec": "int8"}}

SLICED = to_map(
    parse_table(
        RunFile,
        {
            "name": "t",
            "model": {"name": "mlp", "input": [2], "hidden": [4]},
            "classes": ["a", "b"],
            "slices": ["full", "width:1/2"],
        },
        source="test",
    )
)


def do_job(job: dict[str, Any]) -> dict[str, Any]:
    """The answer as it travels; `job` as it travels, with any number."""
    answer: dict[str, Any] = json.loads(answer_line(json.dumps({"id": 0, **job}), process.do))
    return answer


def save(
    path: Path, values: Mapping[str, Tensor], *, codec: str = "fp32", meta: Mapping[str, Any] | None = None
) -> Path:
    """A container; names without a prefix are those of the model."""
    names = [name if "/" in name else f"model/{name}" for name in values]
    table = [(name, codec_for(v, codec), v.shape) for name, v in zip(names, values.values(), strict=True)]
    write_container(path, meta or {}, table, iter(values.values()))
    return path


def load(path: Path) -> dict[str, Tensor]:
    """The tensors of a container; names of the model are without prefix."""
    with ContainerReader(path) as reader:
        return {name.removeprefix("model/"): reader.tensor(name) for name in reader.names()}


def report_meta(payload: str, num_samples: int = 10, steps: int = 0) -> dict[str, Any]:
    """The `meta` of an update."""
    return {"num_samples": num_samples, "payload": payload, "steps": steps}


def check(base: Path, update: Path, max_norm: float | None = None, **more: Any) -> dict[str, Any]:
    """The answer to a check."""
    job = {"id": 1, "job": "check", "base": str(base), "update": str(update), "max_norm": max_norm}
    return do_job(job | more)


def fold_job(model: Path, updates: list[tuple[str, Path, int]], out: Path, base: Path | None = None) -> dict[str, Any]:
    """The fold of round 3; an update is its device, file and number of samples."""
    return {
        "id": 2,
        "job": "fold",
        "run": RUN,
        "round": 3,
        "model": str(model),
        "base": str(base or model),
        "updates": [{"device": d, "path": str(p), "num_samples": n} for d, p, n in updates],
        "out": str(out),
    }


def init(tmp_path: Path, name: str, fields: dict[str, Any], start: Path | None = None) -> dict[str, Any]:
    """Make the first model of a run in a folder."""
    job = {"id": 1, "job": "init", "start": str(start) if start else None, "out": str(tmp_path / name)}
    return do_job(job | fields)


def evaluate(tmp_path: Path, fields: dict[str, Any], **arrays: np.ndarray) -> dict[str, Any]:
    """Evaluate the model `m` in a folder on these test data."""
    np.savez(tmp_path / "test.npz", **arrays)  # type: ignore[arg-type]  # its stub takes only a flag by name
    job = {"id": 1, "job": "evaluate", "model": str(tmp_path / "m"), "data": str(tmp_path / "test.npz")}
    return do_job(job | fields)


def deep_run(method: str | dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A run of a narrow PreResNet-20, whose nine blocks a method may train in groups."""
    model = {"name": "preresnet20", "input": [1, 8, 8], "width": 1, "track-running-stats": True}
    table = {"name": "t", "seed": 5, "method": method, "model": model, "classes": ["a", "b"], **changes}
    return dict(to_map(parse_table(RunFile, table, source="test")))


TASK = """\
import random
import numpy as np
import torch
from torch import nn
from edge_client import Task

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Flatten()
        self.head = nn.Linear(4, num_classes)
        with torch.no_grad():
            self.head.bias.fill_(random.random() + np.random.random())

    def forward(self, x):
        return self.head(BETWEEN(self.stem(x)))

def data(device):
    raise AssertionError("never called on the server")

mine = Task(model=Net, train_data=data, units=["stem", "head"], INPUT)
"""


def task_run(tmp_path: Path, between: str = "", input_: str = "", **run: Any) -> dict[str, Any]:
    """The fields `run` and `task` of a job; the task's source lies there as a blob, without a name of its own."""
    source = TASK.replace("BETWEEN", between).replace("INPUT", input_).encode()
    blob = tmp_path / hashlib.sha256(source).hexdigest()
    blob.write_bytes(source)
    task = {"name": "t", "file": "nets.py:mine", "sha256": blob.name}
    table = {"name": "t", "seed": 5, "task": task, "classes": ["a", "b"], **run}
    return {"run": to_map(parse_table(RunFile, table, source="test")), "task": str(blob)}
