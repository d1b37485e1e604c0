"""What the failure of a job means: the end of the run, or a fault of this machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conductor_bench import Bench

from coordinator.aggregation.jobs import EncodeJob, Failure, WrittenFile
from coordinator.conductor.run_jobs import raise_machine_error
from edge_client.errors import DiskFullError, MachineError


def _job(bench: Bench) -> EncodeJob:
    bench.add_run()
    return EncodeJob(run=bench.active_run().file, model="/model", out=str(bench.folder / "out"))


def test_an_answer_is_passed_on(make_bench: Callable[..., Bench]) -> None:
    """Five bytes were written."""
    bench = make_bench(encode={"write": "model"})
    answers: list[WrittenFile] = []
    bench.jobs.submit_for("r-1", _job(bench), answers.append)
    bench.answer_jobs()
    assert [answer.length for answer in answers] == [5]
    assert bench.failed == []


def test_a_failure_ends_the_run_with_its_reason(make_bench: Callable[..., Bench]) -> None:
    """The child refuses every job: code and detail are the reason, and nothing is passed on."""
    bench = make_bench()
    answers: list[WrittenFile] = []
    bench.jobs.submit_for("r-1", _job(bench), answers.append)
    bench.answer_jobs()
    assert bench.failed == [("r-1", "input: no")]
    assert answers == []


def test_a_forgotten_job_is_never_answered(make_bench: Callable[..., Bench]) -> None:
    """Neither as a success nor as a failure."""
    bench = make_bench()
    answers: list[object] = []
    bench.jobs.submit(_job(bench), answers.append)
    bench.jobs.forget()
    bench.answer_jobs()
    assert (answers, bench.failed) == ([], [])


@pytest.mark.parametrize(("code", "error"), [("disk_full", DiskFullError), ("machine", MachineError)])
def test_a_fault_of_this_machine_ends_no_run(
    make_bench: Callable[..., Bench], code: str, error: type[MachineError]
) -> None:
    """It is raised: the coordinator starts over from what is stored."""
    bench = make_bench()
    with pytest.raises(error, match="why"):
        bench.jobs.failed("r-1", Failure(code=code, detail="why"))
    assert bench.failed == []
    raise_machine_error(Failure(code="not_finite", detail="why"))  # a device's fault: not raised
