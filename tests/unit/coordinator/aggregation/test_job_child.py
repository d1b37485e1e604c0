"""A child that does jobs, as the loop sees it: real processes, among them some that misbehave."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.aggregation import job_child
from coordinator.aggregation.job_child import JobChild, aggregator
from coordinator.aggregation.jobs import Failure, WorkerExit, WorkJob

_CHILD = """
import json, os, sys
for line in sys.stdin:
    job = json.loads(line)
    what = job["folder"]
    if what == "die":
        os._exit(9)
    if what == "noise":
        sys.stdout.write("a library's warning\\n")
    if what == "endless":
        sys.stdout.write("x" * (3 << 20))
    if what == "stale":
        print(json.dumps({"id": job["id"] - 1, "ok": False}))
    if what == "another kind":
        print(json.dumps({"id": job["id"], "ok": True, "norm": 1.0}))
    code = os.getpid() if len(what) < 100 else len(what)
    print(json.dumps({"id": job["id"], "ok": True, "code": code}), flush=True)
"""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobChild]:
    """A `JobChild` whose child answers without torch."""
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command == [sys.executable, "-m", "coordinator.aggregation.process"]
        return real([sys.executable, "-c", _CHILD], **options)

    monkeypatch.setattr(job_child.subprocess, "Popen", start)
    child = aggregator()
    yield child
    child.close()


Answers = dict[str, WorkerExit | Failure]


def _submit(child: JobChild, job: str, answers: Answers) -> None:
    child.submit(WorkJob(folder=job), lambda answer: answers.update({job: answer}))


def _answers(child: JobChild, *jobs: str, now: float = 1000.0) -> Answers:
    """By job, in the order in which they came; the code of a success is the process id of the child."""
    answers: Answers = {}
    for job in jobs:
        _submit(child, job, answers)
    while len(answers) < len(jobs):
        fd = child.fd
        assert fd is not None
        select.select([fd], [], [], 20)
        child.read(now)
    return answers


def test_jobs_are_answered_in_order_by_one_child(child: JobChild) -> None:
    """Three jobs, one process."""
    answers = _answers(child, "a", "b", "c")
    assert list(answers) == ["a", "b", "c"]
    assert child.pid is not None
    assert set(answers.values()) == {WorkerExit(code=child.pid)}


@pytest.mark.parametrize("job", ["die", "noise", "endless", "another kind"])
def test_a_job_that_breaks_its_child_three_times_fails_and_the_next_one_works(child: JobChild, job: str) -> None:
    """A crash, words on the output that are no answer, an answer without an end, an answer to another kind of job."""
    answers = _answers(child, job, "good")
    assert answers[job] == Failure(code="crashed", detail="the aggregator crashed 3 times on it")
    assert isinstance(answers["good"], WorkerExit)


def test_an_answer_to_another_job_is_ignored(child: JobChild) -> None:
    """Its id tells."""
    assert isinstance(_answers(child, "stale")["stale"], WorkerExit)


def test_a_child_that_was_warmed_up_stays_until_it_was_idle_for_long(child: JobChild) -> None:
    """Whatever the clock says at the start: 300 s count from the first look at it."""
    child.warm_up()
    pid = child.pid
    child.tick(1_000_000.0)
    child.tick(1_000_300.0)
    assert child.pid == pid
    assert pid is not None
    assert _answers(child, "a", now=1_000_301.0) == {"a": WorkerExit(code=pid)}
    child.tick(1_000_601.0)
    assert child.pid == pid
    child.tick(1_000_602.0)
    assert child.pid is None


def test_forgotten_jobs_are_never_answered(child: JobChild) -> None:
    """The service started over: the job in flight and the one behind it are gone with their child."""
    answers: Answers = {}
    _submit(child, "a", answers)
    _submit(child, "b", answers)
    child.forget_jobs()
    assert child.pid is None
    assert list(_answers(child, "c")) == ["c"]
    assert answers == {}


def test_a_child_that_died_while_idle_is_replaced(child: JobChild) -> None:
    """Somebody killed it between two rounds."""
    child.warm_up()
    assert child._process is not None
    child._process.kill()
    child._process.wait()
    assert isinstance(_answers(child, "a")["a"], WorkerExit)


def test_a_long_job_for_a_child_that_does_not_read_yet_keeps_nobody_waiting(child: JobChild) -> None:
    """3 MB for a child that is stopped, as while it loads torch: more than its pipe takes; ticks bring the rest."""
    child.warm_up()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    answers: Answers = {}
    job = "x" * 3_000_000
    _submit(child, job, answers)
    assert child._unsent
    os.kill(child.pid, signal.SIGCONT)
    while not answers:
        child.tick(0.0)
        assert child.fd is not None
        select.select([child.fd], [], [], 0.01)
        child.read(0.0)
    assert answers == {job: WorkerExit(code=3_000_000)}


def test_small_jobs_travel_together(child: JobChild, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 the first goes alone, because nothing else waits then; the child has at most 32 at a time."""
    monkeypatch.setattr(job_child, "is_small", lambda job: True)
    sent, real = list[int](), os.write

    def write(fd: int, data: bytes) -> int:
        sent.append(bytes(data).count(b"\n"))
        return real(fd, data)

    monkeypatch.setattr(job_child.os, "write", write)
    jobs = [f"job {number}" for number in range(80)]
    answers = _answers(child, *jobs)
    assert list(answers) == jobs
    assert sent[0] == 1
    assert 31 <= sent[1] <= 32  # the first may be still with the child
    assert sum(sent) == 80
    assert len(sent) <= 6  # 1 + 31, then at least 16 at a time


def test_a_small_job_that_kills_the_child_takes_no_other_with_it(
    child: JobChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it are answered, and so are those behind it, by a later child."""
    monkeypatch.setattr(job_child, "is_small", lambda job: True)
    answers = _answers(child, "a", "b", "die", "c", "d")
    assert answers["die"] == Failure(code="crashed", detail="the aggregator crashed 3 times on it")
    codes = [answer.code for answer in answers.values() if isinstance(answer, WorkerExit)]
    assert len(codes) == 4
    assert codes[2] == codes[3] == child.pid
