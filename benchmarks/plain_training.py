"""The trainings of a round in plain PyTorch: `python -m benchmarks.plain_training RUN.json DEVICE.json ...`.

One process, one thread, torch and data loaded before it says `ready`. For every line on its standard input it trains a
new model on the samples of each device, one after the other, and answers `done`: no messages, no files, no plan. Two
such processes beside each other are what two cores can do. Each DEVICE.json is the `data` section of a device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from edge_client.config.device_file import DataSection
from edge_client.config.run_file import RunFile
from edge_client.data.sources import open_data
from edge_client.models import registry
from edge_client.records import from_map


def main() -> int:
    """Train at every line, until the input ends."""
    torch.set_num_threads(1)
    file: RunFile = from_map(RunFile, json.loads(Path(sys.argv[1]).read_bytes()), where="run")
    devices = [_samples(file, Path(name)) for name in sys.argv[2:]]
    _train(file, *(part[: file.train.batch] for part in devices[0]))  # loads what a first step loads
    print("ready", flush=True)
    for _ in sys.stdin:
        for x, y in devices:
            _train(file, x, y)
        print("done", flush=True)
    return 0


def _samples(file: RunFile, path: Path) -> tuple[Tensor, Tensor]:
    assert file.model is not None
    section: DataSection = from_map(DataSection, json.loads(path.read_bytes()), where=path.name)
    samples, _ = open_data(section, file.classes, file.model.input)
    return samples.batch(torch.arange(len(samples)))


def _train(file: RunFile, x: Tensor, y: Tensor) -> None:
    assert file.model is not None
    model = registry.build(
        file.model.name, input_shape=file.model.input, num_classes=len(file.classes), options=file.model.options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=file.train.lr, momentum=file.train.momentum)
    model.train()
    for _ in range(file.train.epochs_of(len(y))):
        for chosen in torch.randperm(len(y)).split(file.train.batch):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()


if __name__ == "__main__":
    sys.exit(main())
