"""What InCo costs the coordinator: the transform of a ResNet26's mean update against aggregating ten updates of 70 MB.

Both in the same folds of InCo over FedAvg, as the aggregator does them: updates on disk, one thread; CPU time. What
FedAvg's part takes (read, decode, add, divide) is aggregating, the rest is the transform, its second reading of the old
weights included. The mean alone, of tensors that are in memory already, stands beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.federation import scratch
from benchmarks.figures import Figure
from edge_client.device import guard

__all__ = ["measure"]

_NUM_UPDATES = 10
_GOAL = 0.20


def measure(*, quick: bool) -> list[Figure]:
    """Shares of the time of a fold, turn by turn."""
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        command = [sys.executable, "-m", "benchmarks.inco_transform", folder, "3" if quick else "15"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=900)
    found = json.loads(done.stdout)
    return [
        Figure(name="aggregating ten updates of ResNet26", unit="s", values=tuple(found["base"])),
        Figure(name="its coverage mean alone", unit="s", values=tuple(found["mean"])),
        Figure(name="InCo's transform", unit="s", values=tuple(found["transform"])),
        Figure(name="share of aggregating", unit="x", values=tuple(found["share"]), at_most=_GOAL),
    ]


def _times(folder: Path, turns: int) -> dict[str, list[float]]:
    import torch
    from torch import Tensor

    from coordinator.aggregation import process
    from coordinator.aggregation.frozen import FrozenSet, FrozenUpdate, ModelState
    from coordinator.aggregation.jobs import InitJob
    from edge_client.config.run_file import RunFile
    from edge_client.config.tables import parse_table
    from edge_client.methods.base import Frozen, State
    from edge_client.methods.cards.inco import InCoParameters
    from edge_client.methods.fedavg import CoverageServer
    from edge_client.methods.inco import InCoServer
    from edge_client.params import coverage_mean
    from edge_client.records import Report, to_map
    from edge_client.wire.tensors import ContainerReader, codec_for, write_container

    torch.set_num_threads(1)
    model = {"name": "resnet26", "input": [3, 32, 32]}
    table = {"name": "bench", "method": {"name": "inco"}, "model": model, "classes": [str(c) for c in range(10)]}
    start = folder / "model.bin"
    run = parse_table(RunFile, table, source="benchmark")
    process.do(InitJob(run=run, out=str(start)))
    with ContainerReader(start) as reader:
        tensors = {name: reader.tensor(name) for name in reader.names()}
    listed = [(name, codec_for(tensor, "fp32"), tuple(tensor.shape)) for name, tensor in tensors.items()]
    report = to_map(Report(num_samples=10, steps=1, payload="params"))
    updates = []
    for number in range(_NUM_UPDATES):
        path = folder / f"update-{number}.bin"
        moved = (t + 0.01 * torch.randn_like(t) if t.is_floating_point() else t for t in tensors.values())
        write_container(path, report, listed, moved)
        updates.append(FrozenUpdate(device=f"d{number}", path=path, num_samples=10))

    class Timed(CoverageServer):
        def __init__(self) -> None:
            super().__init__()
            self.seconds = 0.0

        def fold(self, state: State, frozen: Frozen, *, round: int) -> Iterator[tuple[str, Tensor]]:
            folded = super().fold(state, frozen, round=round)
            while True:
                begin = time.process_time()
                item = next(folded, None)
                self.seconds += time.process_time() - begin
                if item is None:
                    return
                yield item

    def fold() -> tuple[float, float]:
        base = Timed()
        server, frozen = InCoServer(InCoParameters(), base), FrozenSet(start, updates)
        with ContainerReader(start) as reader:
            begin = time.process_time()
            for _ in server.fold(ModelState(reader), frozen, round=1):
                pass
            return base.seconds, time.process_time() - begin - base.seconds

    def mean() -> float:
        begin = time.process_time()
        for tensor in tensors.values():
            coverage_mean(tensor, ((tensor, None, 10.0) for _ in range(_NUM_UPDATES)))
        return time.process_time() - begin

    found: dict[str, list[float]] = {"base": [], "mean": [], "transform": [], "share": []}
    for turn in range(turns + 1):
        (base, transform), alone = fold(), mean()
        if turn:  # the first warms up
            values = {"base": base, "mean": alone, "transform": transform, "share": transform / base}
            for name, value in values.items():
                found[name].append(value)
    return found


if __name__ == "__main__":
    guard.pin_malloc()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as in the aggregator
    print(json.dumps(_times(Path(sys.argv[1]), int(sys.argv[2]))))
