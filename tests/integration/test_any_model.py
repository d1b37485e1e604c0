"""A module of one's own, without named units, in a federation: its units are found, and FeDepth trains it in groups."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typed import typed

from edge_client.wire.container import MODEL_PREFIX
from edge_client.wire.tensors import ContainerReader

TASK = """
import numpy as np
from torch import nn
from torch.nn import functional as F

from edge_client import Task


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn, self.conv2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1)

    def forward(self, x):
        return F.relu(self.bn(self.conv1(x)) + self.conv2(x))


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, training=self.training)
        return self.fc(x.mean(dim=(2, 3)))


def train_data(device):
    random = np.random.default_rng(1)
    return random.normal(size=(96, 1, 8, 8)).astype("float32"), np.arange(96) % 4


task = Task(model=Net, train_data=train_data, input=(1, 8, 8))
"""

RUN = """
name = "own"
task = { name = "own", file = "own.py:task", init = "file:start.pth" }
method = { name = "fedepth" }
classes = ["0", "1", "2", "3"]
stop = { rounds = 1 }

[train]
batch = 32

[simulate]
devices = 1
training-budgets = ["4.5MB"]
"""


def test_a_module_without_units_trains_in_groups_from_a_file_of_weights(tmp_path: Path) -> None:
    """Whole batches take about 6 MB, so 4.5 MB needs groups; all weights moved a little, and no name changed."""
    (tmp_path / "own.py").write_text(TASK, encoding="utf-8")
    names: dict[str, object] = {"__name__": "own"}
    exec(TASK, names)
    torch.manual_seed(3)
    start = names["Net"](10).state_dict()  # type: ignore[operator]  # another head: left out
    torch.save(start, tmp_path / "start.pth")
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    environment = {"FEDFIT_CACHE_DIR": str(tmp_path / "cache")}
    ran = typed("coordinator", "simulate", tmp_path / "run.toml", "--out", tmp_path / "out", environment=environment)
    assert ran.returncode == 0, ran.stderr
    assert "groups" in ran.stdout
    (units,) = (json.loads(path.read_text()) for path in (tmp_path / "cache" / "units").glob("*.json"))
    assert len(units["names"]) >= 4
    with ContainerReader(tmp_path / "out" / "model.bin") as reader:
        trained = {name.removeprefix(MODEL_PREFIX): reader.tensor(name) for name in reader.names(MODEL_PREFIX)}
    assert list(trained) == list(start)
    for name, tensor in trained.items():
        if name.startswith("fc"):
            assert len(tensor) == 4
        elif name.endswith("weight"):
            assert 0 < float((tensor - start[name]).abs().max()) < 0.5  # it went on from the file
