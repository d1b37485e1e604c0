"""A worker of a simulation that trains nothing: it answers each assignment with the model, changed in one number.

Takes the place of `coordinator.simulation.worker` where the simulator itself is measured; no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from benchmarks.no_training_worker import num_samples_of, update_pieces
from coordinator.aggregation.job_child import answer_jobs
from coordinator.aggregation.jobs import Job, WorkerExit, WorkJob
from edge_client.device import guard

__all__ = ["main"]


def main() -> int:
    """Answer jobs until the input ends."""
    guard.die_with_parent(int(os.environ["FEDFIT_PARENT_PID"]))
    answer_jobs(_work)
    return 0


def _work(job: Job[object]) -> WorkerExit:
    assert isinstance(job, WorkJob)
    folder = Path(job.folder)
    order = json.loads((folder / "order.json").read_bytes())
    device, digest, length = order["device"], hashlib.sha256(), 0
    with open(folder / "update.bin", "wb", buffering=0) as out:
        for piece in update_pieces(Path(order["parts"]["run"]), Path(order["parts"]["model"]), device, order["round"]):
            digest.update(piece)
            length += out.write(piece)
    manifest = {"sha256": digest.hexdigest(), "length": length, "num_samples": num_samples_of(device)}
    (folder / "update.json").write_text(json.dumps(manifest), encoding="utf-8")
    return WorkerExit(code=0)


if __name__ == "__main__":
    sys.exit(main())
