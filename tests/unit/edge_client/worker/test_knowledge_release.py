"""Which knowledge leaves the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from worker_runs import (
    fork_worker,
    make_work,
    read_update,
)

from edge_client.models import registry
from edge_client.wire.container import read_header
from edge_client.wire.tensors import write_container


def test_knowledge_that_would_be_refused_stays_and_the_rest_of_the_update_goes(tmp_path: Path) -> None:
    """Four inputs of 1e8: features (weights of 1) are 4e8, the limit is 1e6; logits (weights of 0) are 0 and go."""
    x, y = np.full((40, 4), 1e8, dtype=np.float32), np.arange(40) % 2
    np.savez(tmp_path / "x.npz", x=x, y=y)
    run = {
        "model": {"name": "mlp", "input": [4], "hidden": [3]},
        "classes": ["0", "1"],
        "method": {"name": "felo"},
        "train": {"max-steps": 1, "batch": 64},
    }
    data = {"source": "npz", "train": str(tmp_path / "x.npz"), "test_fraction": 0.0}
    device = {"data": data, "share": {"min_count": 10}}
    work = make_work(tmp_path / "w", run=run, evaluate=False, learning_rate=0.0, device_file=device)
    model = registry.build("mlp", input_shape=(4,), num_classes=2, options={"hidden": [3]})
    state = {name: torch.full_like(value, float(value.shape[0] == 3)) for name, value in model.state_dict().items()}
    rows = [(f"model/{name}", "fp32", tuple(tensor.shape)) for name, tensor in state.items()]
    write_container(work / "model.bin", {}, rows, state.values())
    assert fork_worker(work) == 0
    _, tensors = read_update(work)
    assert {name for name in tensors if name.startswith("knowledge/")} == {
        "knowledge/class/logit/counts",
        "knowledge/class/logit/values",
    }
    assert {name for name in tensors if name.startswith("model/")} == {f"model/{name}" for name in state}
    told = read_header(work / "update.bin").meta["x-held-back"]
    assert told == "range: this device: 'values' of its 'class/feature' has values beyond 1e+06, or not finite"
