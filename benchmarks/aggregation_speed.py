"""How fast the coordinator absorbs updates: a coverage mean over ResNet-18, ten updates of 45 MB, one thread.

The fold runs in a process of its own, as the aggregator does it: read from disk, decode, check, add in float64, divide,
write the next model. Counted are the bytes of fp32 that came in, by CPU time; memory in the number of updates is
`aggregation_memory`'s figure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.federation import scratch
from benchmarks.figures import Figure
from edge_client.device import guard

__all__ = ["measure"]

_NUM_UPDATES = 10
_GOAL_GB_S = 1.0


def measure(*, quick: bool) -> list[Figure]:
    """GB of fp32 per second of the fold, and per second of adding alone."""
    repeats = 2 if quick else 5
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        command = [sys.executable, "-m", "benchmarks.aggregation_speed", folder, str(repeats)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600)
    found = json.loads(done.stdout)
    return [
        Figure(name="coverage mean, per update", unit="GB/s", values=tuple(found["mean"]), at_least=_GOAL_GB_S),
        Figure(name="whole fold, from disk to disk", unit="GB/s", values=tuple(found["fold"])),
    ]


def _fold(folder: Path, repeats: int) -> dict[str, list[float]]:
    import torch

    from coordinator.aggregation import process
    from coordinator.aggregation.jobs import FoldedModel, FoldJob, InitJob, UpdateRef
    from edge_client.config.run_file import RunFile
    from edge_client.config.tables import parse_table
    from edge_client.params import coverage_mean
    from edge_client.records import Report, to_map
    from edge_client.wire.container import MODEL_PREFIX
    from edge_client.wire.tensors import ContainerReader, codec_for, write_container

    torch.set_num_threads(1)
    model = {"name": "resnet18", "input": [3, 32, 32]}
    table = {"name": "bench", "model": model, "classes": [str(c) for c in range(10)]}
    run = parse_table(RunFile, table, source="benchmark")
    start = folder / "model.bin"
    process.do(InitJob(run=run, out=str(start)))
    with ContainerReader(start) as reader:
        tensors = {name: reader.tensor(name) for name in reader.names(MODEL_PREFIX)}
    listed = [(name, codec_for(tensor, "fp32"), tuple(tensor.shape)) for name, tensor in tensors.items()]
    report = to_map(Report(num_samples=10, steps=1, payload="params"))
    updates = []
    for number in range(_NUM_UPDATES):
        path = folder / f"update-{number}.bin"
        write_container(path, report, listed, tensors.values())
        updates.append(UpdateRef(device=f"d{number}", path=str(path), num_samples=10))
    num_gb = _NUM_UPDATES * sum(t.nbytes for t in tensors.values()) / 1e9
    model_file, out = str(start), str(folder / "next.bin")
    job = FoldJob(run=run, round=1, model=model_file, base=model_file, updates=tuple(updates), out=out)
    fold, mean = [], []
    for _ in range(repeats + 1):
        begin = time.process_time()
        answer = process.do(job)
        fold.append(num_gb / (time.process_time() - begin))
        assert isinstance(answer, FoldedModel), answer
        begin = time.process_time()
        for tensor in tensors.values():
            coverage_mean(tensor, ((tensor, None, 10.0) for _ in range(_NUM_UPDATES)))
        mean.append(num_gb / (time.process_time() - begin))
    return {"fold": fold[1:], "mean": mean[1:]}


if __name__ == "__main__":
    guard.pin_malloc()
    print(json.dumps(_fold(Path(sys.argv[1]), int(sys.argv[2]))))
