"""The codec of jobs and answers: what one side encodes, the other side decodes; what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from rows import run_file

from coordinator.aggregation import jobs
from coordinator.aggregation.jobs import (
    CheckedUpdate,
    CheckJob,
    EncodeJob,
    Failure,
    FoldedModel,
    FoldJob,
    Job,
    StudyTimes,
    UpdateRef,
    WorkerExit,
    WorkJob,
    WrittenFile,
    answer_line,
    encode_job,
    read_answer,
)
from edge_client.errors import (
    ConflictError,
    DiskFullError,
    FedfitError,
    InputError,
    MachineError,
    NoSuchNameError,
    PayloadError,
)
from edge_client.knowledge.schema import Limits
from edge_client.methods.base import LeftOut

LIMITS = Limits(kinds=("class/logit",), num_classes=2, max_rows=10, max_bytes=100)
FOLD = FoldJob(
    run=run_file(slices=["full", "width:1/2"]),
    round=3,
    model="/m",
    base="/b",
    updates=(UpdateRef(device="a", path="/u", num_samples=7, slice="width:1/2"),),
    num_devices=4,
    out="/o",
)


@pytest.mark.parametrize(
    "job", [FOLD, WorkJob(folder="/w"), CheckJob(base="/b", update="/u", max_norm=1.5, knowledge=LIMITS)]
)
def test_a_job_arrives_as_it_was_sent(job: Job[Any]) -> None:
    """With its number, in one line of JSON."""
    received: list[Job[Any]] = []

    def do(job: Job[Any]) -> Failure:
        received.append(job)
        return Failure(code="input", detail="no")

    line = encode_job(7, job)
    assert line.count(b"\n") == 1
    assert json.loads(answer_line(line.decode(), do)) == {"id": 7, "ok": False, "code": "input", "detail": "no"}
    assert received == [job]


@pytest.mark.parametrize(
    ("job", "answer"),
    [
        (
            FOLD,
            FoldedModel(
                sha256="ab" * 32,
                length=5,
                left_out=(LeftOut(code="silent", detail="none"),),
                study=StudyTimes(began_s=1.0, ended_s=2.5, waited_s=0.0),
            ),
        ),
        (WorkJob(folder="/w"), WorkerExit(code=76)),
        (WorkJob(folder="/w"), Failure(code="crashed", detail="")),
    ],
)
def test_an_answer_arrives_as_it_was_given(job: Job[Any], answer: object) -> None:
    """The job says which type it has."""
    line = read_answer(answer_line(encode_job(7, job).decode(), lambda _: answer))
    assert line.number == 7
    assert line.answer_to(job) == answer


@pytest.mark.parametrize(
    ("line", "job"),
    [
        ('{"id": 1, "ok": true, "norm": 1.0}', WorkJob(folder="/w")),
        ('{"id": 1, "ok": true, "code": "0"}', WorkJob(folder="/w")),
        ('{"id": 1, "ok": true, "sha256": "ab", "length": 5}', FOLD),
        ('{"id": 1, "ok": false}', FOLD),
        ('{"id": 1}', FOLD),
    ],
)
def test_an_answer_of_another_form_is_refused(line: str, job: Job[Any]) -> None:
    """Another kind of answer, another type of a field, no hash, no reason."""
    with pytest.raises(PayloadError, match=r"answer to '(work|fold)'"):
        read_answer(line).answer_to(job)


@pytest.mark.parametrize("line", ["{", "7", '["id"]'])
def test_a_line_that_is_no_object_is_no_answer(line: str) -> None:
    """Such as the words of a library."""
    with pytest.raises(ValueError, match=r"expected|Expecting"):
        read_answer(line)


def test_numbers_that_json_has_not_are_never_sent() -> None:
    """NaN would be read by Python alone: it is a bug of ours."""
    job = CheckJob(base="/b", update="/u")
    with pytest.raises(ValueError, match="JSON compliant"):
        answer_line(encode_job(1, job).decode(), lambda _: CheckedUpdate(norm=math.nan))


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (DiskFullError("x"), "disk_full", DiskFullError),
        (MachineError("x"), "machine", MachineError),
        (NoSuchNameError("x"), "unknown_name", NoSuchNameError),
        (InputError("x"), "input", InputError),
        (ConflictError("x"), "failed", MachineError),
        (PayloadError("not_finite", "x"), "not_finite", MachineError),
    ],
)
def test_errors_cross_the_pipe_as_codes(error: FedfitError, code: str, kind: type[FedfitError]) -> None:
    """Those whose cause the other side must know come out as they went in."""
    failure = Failure.of(error)
    assert failure == Failure(code=code, detail="x")
    assert type(failure.error()) is kind
    assert str(failure.error()) == "x"


def test_every_job_has_a_name_and_an_answer() -> None:
    """A job that is missing in the table could not be sent."""
    classes = {one for one in vars(jobs).values() if isinstance(one, type) and issubclass(one, Job) and one is not Job}
    assert set(jobs._BY_JOB) == classes
    assert all(dataclasses.is_dataclass(kind.answer) for kind in jobs._KINDS)
    assert jobs._BY_JOB[EncodeJob].answer is WrittenFile
