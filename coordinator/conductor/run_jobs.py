"""The aggregator's jobs for a run: one that fails ends the run, unless this machine is to blame."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from coordinator.aggregation.job_child import JobChild
from coordinator.aggregation.jobs import Failure, Job

__all__ = ["RunJobs", "raise_machine_error"]

A = TypeVar("A")


def raise_machine_error(failure: Failure) -> None:
    """Raise `MachineError` (or `DiskFullError`) if this machine failed, and neither the run nor the device."""
    if failure.code in ("disk_full", "machine"):
        raise failure.error()


class RunJobs:
    """The jobs of the active run, or of the one that is being prepared."""

    def __init__(self, aggregation: JobChild, *, fail: Callable[[str, str], None]) -> None:
        """`fail` ends a run, with a reason."""
        self._aggregation = aggregation
        self._fail = fail

    def warm_up(self) -> None:
        """Start the aggregator before it is needed."""
        self._aggregation.warm_up()

    def submit(self, job: Job[A], then: Callable[[A | Failure], None]) -> None:
        """Queue a job; `then` gets its answer, or its failure."""
        self._aggregation.submit(job, then)

    def submit_for(self, run_id: str, job: Job[A], then: Callable[[A], None]) -> None:
        """Queue a job that the run cannot do without: `then` gets its answer; a failure ends the run."""

        def answered(answer: A | Failure) -> None:
            if isinstance(answer, Failure):
                self.failed(run_id, answer)
            else:
                then(answer)

        self._aggregation.submit(job, answered)

    def failed(self, run_id: str, failure: Failure) -> None:
        """End the run with the failure as its reason; raises what `raise_machine_error` raises."""
        raise_machine_error(failure)
        self._fail(run_id, f"{failure.code}: {failure.detail}")

    def forget(self) -> None:
        """Drop all jobs: nobody wants an ended run's answers, and a task's own code may never give one."""
        self._aggregation.forget_jobs()
