"""The aggregator: the coordinator's child process that touches values of models.

`python -m coordinator.aggregation.process` does the jobs of `jobs` in the order in which they come. It ends at the end
of its input, and dies with its parent. An error that fedfit raises on purpose, or that the disk causes, is answered as
a `Failure`. A bug ends the process with a traceback and exit code 1; its parent starts another.

Covers: the process, and which part does which job. One thread computes: sums have the same bits on every machine of a
kind. Does not cover: which updates count, and what becomes permanent: the file at a job's `out` is a plain file, which
the coordinator publishes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from coordinator.aggregation.job_child import answer_jobs
from coordinator.aggregation.jobs import (
    CalibrateJob,
    CheckJob,
    EncodeJob,
    EvaluateJob,
    Failure,
    FoldJob,
    InitJob,
    Job,
    NormaliseJob,
    ProbeJob,
    StudyJob,
    TellJob,
    name_of,
)
from edge_client import durable, faults
from edge_client.device import guard
from edge_client.errors import FedfitError
from edge_client.methods import user_methods

__all__ = ["do", "main"]


def do(job: Job[Any]) -> object:
    """Do one job and return its answer, or the failure."""
    faults.in_round(getattr(job, "round", None))  # of a job that belongs to one
    name = name_of(job)
    _keep_freed_memory(job)
    try:
        with (
            _naming_the_method(job, f"the server's {name}"),
            durable.disk_errors(f"aggregator job {name!r}"),
        ):
            return _answer(job)
    except FedfitError as error:
        return Failure.of(error)


def _keep_freed_memory(job: Job[Any]) -> None:
    """From check to check, freed tensors make room for the next ones of their size, which are small then.

    New memory would be cleared by the kernel first, which takes longer than the check. Other jobs have more in memory.
    """
    if isinstance(job, CheckJob):
        guard.keep_freed_memory()
    else:
        guard.return_freed_memory()


def _naming_the_method(job: Job[Any], doing: str) -> AbstractContextManager[object]:
    """Errors in a user's own method name its file."""
    run = getattr(job, "run", None)  # a check has none
    return user_methods.guard(run.method.name, doing) if run is not None else nullcontext()


def _answer(job: Job[Any]) -> object:
    """Import the part that does the job, and let it: the parts load torch, and malloc must be pinned before that."""
    match job:
        case InitJob():
            from coordinator.aggregation.first_model import make_first_model

            return make_first_model(job)
        case CalibrateJob():
            from coordinator.aggregation.calibrate import calibrate

            return calibrate(job)
        case EncodeJob():
            from coordinator.aggregation.encode import encode_slice

            return encode_slice(job)
        case TellJob():
            from coordinator.aggregation.tell import write_knowledge

            return write_knowledge(job)
        case StudyJob():
            from coordinator.aggregation.studies import start_study

            return start_study(job)
        case CheckJob():
            from coordinator.aggregation.check import check_update

            return check_update(job)
        case NormaliseJob():
            from coordinator.aggregation.normalise import normalise_model

            return normalise_model(job)
        case FoldJob():
            from coordinator.aggregation.fold import fold_updates

            return fold_updates(job)
        case EvaluateJob():
            from coordinator.aggregation.evaluate import evaluate_model

            return evaluate_model(job)
        case ProbeJob():
            from coordinator.aggregation.comparison import compare_models

            return compare_models(job)
    raise TypeError(f"the aggregator does no {name_of(job)!r}")


def main() -> int:
    """Answer jobs until the input ends."""
    guard.die_with_parent()
    guard.pin_malloc()
    # every tensor is read into fresh memory: with huge pages a fifth less time goes into getting it
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the coordinator ends us by EOF
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    import torch

    torch.set_num_threads(1)
    answer_jobs(do)
    return 0


if __name__ == "__main__":
    guard.end(main())
