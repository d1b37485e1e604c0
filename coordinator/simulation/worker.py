"""A worker of a simulation: `python -m coordinator.simulation.worker` does one assignment after another.

It answers each `WorkJob` with the exit code that a separate worker would have ended with. torch is loaded once, and
open data stays open. Each assignment begins as in a new process: its peak is measured from zero, and no limit of the
one before holds.

Covers: the process. Does not cover: the work (`edge_client.worker.assignment`), whose turn it is
(`coordinator.simulation.worker_pool`).
After a failure of the disk, or a bug, the process ends, and the pool starts another.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from coordinator.aggregation.job_child import answer_jobs
from coordinator.aggregation.jobs import Job, WorkerExit, WorkJob
from edge_client import durable
from edge_client.device import guard, meter
from edge_client.worker import exit_codes
from edge_client.worker import process as worker

__all__ = ["main"]

_UNHARMED = (exit_codes.DONE, exit_codes.OVER_BUDGET, exit_codes.DECLINED)  # these leave the process as it was


def main() -> int:
    """Answer jobs until the input ends."""
    worker.stand_guard()
    logging.disable(logging.ERROR)  # the answer holds all that matters
    from edge_client.worker.process_cache import ProcessCache

    cache = ProcessCache()
    failed = False

    def work(job: Job[object]) -> WorkerExit:
        nonlocal failed
        assert isinstance(job, WorkJob)
        if failed:
            sys.exit(1)  # the pool gives the job to a new process
        guard.lift_limit()
        meter.reset_peak()
        code = worker.attempt(Path(job.folder), cache)
        failed = code not in _UNHARMED
        return WorkerExit(code=code)

    with durable.relaxed():
        answer_jobs(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
