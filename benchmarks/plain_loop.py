"""The training of a simulation as a plain PyTorch loop: one process, everything in memory, no codec, no devices.

`python -m benchmarks.plain_loop RUN.toml DATA PARTS ROUNDS` prints the seconds of each round, on the
clock and of the CPU, and the last accuracy.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_client.config.device_file import DataSection
from edge_client.config.run_file import RunFile, load_run_file
from edge_client.data.sets import npz
from edge_client.data.sources import Samples, all_samples, open_data
from edge_client.device import guard
from edge_client.models import registry

__all__ = ["main"]


def main() -> int:
    """Train; figures as JSON on standard output."""
    file, num_rounds = load_run_file(Path(sys.argv[1])), int(sys.argv[4])
    devices, test = _load(file, sys.argv[2], sys.argv[3])
    torch.set_num_threads(file.train.threads)
    torch.manual_seed(file.seed)
    assert file.model is not None
    model = registry.build(
        file.model.name, input_shape=file.model.input, num_classes=len(file.classes), options=file.model.options
    )
    seconds, cpu, accuracy = [], [], 0.0
    for _ in range(num_rounds):
        began, used = time.monotonic(), time.process_time()
        model.load_state_dict(_average([(_train(copy.deepcopy(model), x, y, file), len(y)) for x, y in devices]))
        accuracy = _accuracy(model, *test)
        seconds.append(time.monotonic() - began)
        cpu.append(time.process_time() - used)
    json.dump({"seconds": seconds, "cpu_s": cpu, "accuracy": accuracy}, sys.stdout)
    return 0


def _load(file: RunFile, data: str, parts: str) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Every device's samples, and the test set, as tensors."""
    assert file.simulate is not None
    assert file.model is not None
    num = file.simulate.devices
    sections = [DataSection(source=f"npz:{data}", partition=f"file:{parts}", part=(i, num)) for i in range(num)]
    devices = [_all(open_data(section, file.classes, file.model.input)[0]) for section in sections]
    return devices, _all(all_samples(npz(data, test=True), file.classes, file.model.input))


def _all(samples: Samples) -> tuple[Tensor, Tensor]:
    return samples.batch(torch.arange(len(samples)))


def _train(model: nn.Module, x: Tensor, y: Tensor, file: RunFile) -> dict[str, Tensor]:
    train = file.train
    optimizer = torch.optim.SGD(model.parameters(), lr=train.lr, momentum=train.momentum)
    model.train()
    for _ in range(train.epochs):
        for chosen in torch.randperm(len(y)).split(train.batch):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return model.state_dict()


def _average(updates: list[tuple[dict[str, Tensor], int]]) -> dict[str, Tensor]:
    total = sum(num for _, num in updates)
    return {name: sum(state[name] * (num / total) for state, num in updates) for name in updates[0][0]}


@torch.no_grad()
def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    return float((model(x).argmax(dim=1) == y).float().mean())


if __name__ == "__main__":
    guard.pin_malloc()
    sys.exit(main())
