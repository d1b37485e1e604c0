"""What comparing the devices' models adds to a round: CPU time of the aggregator's job `probe`, one thread.

Eight devices with the whole model, 256 test samples of 3x32x32, ten classes. Beside it what judging a version on 1,000
such samples takes, which comes with every evaluated round; both as the aggregator does them, in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.federation import scratch
from benchmarks.figures import Figure
from coordinator.aggregation.jobs import EvaluateJob, Failure, InitJob, Job, ProbedUpdate, ProbeJob
from edge_client.device import guard

__all__ = ["measure"]

_MODELS = ("small-cnn", "preresnet20", "resnet18")
_NUM_DEVICES = 8
_NUM_SAMPLES = 1000


def measure(*, quick: bool) -> list[Figure]:
    """Seconds of each model."""
    figures: list[Figure] = []
    for model in _MODELS:
        with tempfile.TemporaryDirectory(dir=scratch()) as folder:
            command = [sys.executable, "-m", "benchmarks.similarity", folder, model, "1" if quick else "5"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=900)
        found = json.loads(done.stdout)
        figures += [
            Figure(name=f"{model}: eight devices compared", unit="s", values=tuple(found["probe"])),
            Figure(name=f"{model}: 1,000 samples judged", unit="s", values=tuple(found["evaluate"])),
        ]
    return figures


def _times(folder: Path, model: str, turns: int) -> dict[str, list[float]]:
    import torch

    from coordinator.aggregation import process

    torch.set_num_threads(1)
    jobs = _jobs(folder, model)
    found: dict[str, list[float]] = {"probe": [], "evaluate": []}
    for turn in range(turns + 1):
        for name, job in jobs.items():
            begin = time.process_time()
            answer = process.do(job)
            assert not isinstance(answer, Failure), answer
            if turn:  # the first warms up
                found[name].append(time.process_time() - begin)
    return found


def _jobs(folder: Path, model: str) -> dict[str, Job[Any]]:
    """The job of each kind, with all files that it reads."""
    import numpy as np

    from coordinator.aggregation import process
    from edge_client.config.run_file import RunFile
    from edge_client.config.tables import parse_table
    from edge_client.records import Report, to_map
    from edge_client.wire.tensors import ContainerReader, codec_for, write_container

    table = {"name": "bench", "model": {"name": model, "input": [3, 32, 32]}, "classes": [str(c) for c in range(10)]}
    start, data = folder / "model.bin", folder / "test.npz"
    run = parse_table(RunFile, table, source="benchmark")
    process.do(InitJob(run=run, out=str(start)))
    x = np.random.default_rng(1).random((_NUM_SAMPLES, 3, 32, 32), dtype=np.float32)
    np.savez(data, x=x, y=np.arange(_NUM_SAMPLES) % 10)
    report = to_map(Report(num_samples=10, steps=1, payload="params"))
    with ContainerReader(start) as reader:
        tensors = {name: reader.tensor(name) for name in reader.names()}
    listed = [(name, codec_for(tensor, "fp32"), tuple(tensor.shape)) for name, tensor in tensors.items()]
    updates = []
    for number in range(_NUM_DEVICES):
        path = folder / f"update-{number}.bin"
        write_container(path, report, listed, iter(tensors.values()))
        updates.append(ProbedUpdate(device=f"d{number}", path=str(path)))
    model_file = str(start)
    return {
        "probe": ProbeJob(run=run, round=1, model=model_file, base=model_file, updates=tuple(updates), data=str(data)),
        "evaluate": EvaluateJob(run=run, model=model_file, data=str(data)),
    }


if __name__ == "__main__":
    guard.pin_malloc()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as in the aggregator
    print(json.dumps(_times(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
