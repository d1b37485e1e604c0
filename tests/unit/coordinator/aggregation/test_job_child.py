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
from coordinator.aggregation.job_child import AGGREGATOR, JobChild

_CHILD = """
import json, os, sys
for line in sys.stdin:
    job = json.loads(line)
    if job["job"] == "die":
        os._exit(9)
    if job["job"] == "noise":
        sys.stdout.write("a library's warning\\n")
    if job["job"] == "endless":
        sys.stdout.write("x" * (3 << 20))
    if job["job"] == "stale":
        print(json.dumps({"id": job["id"] - 1, "ok": False}))
    length = len(job.get("more", ""))
    print(json.dumps({"id": job["id"], "ok": True, "pid": os.getpid(), "job": job["job"], "more": length}), flush=True)
"""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobChild]:
    """A `JobChild` whose child answers without torch."""
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command == [sys.executable, "-m", "coordinator.aggregation.aggregator"]
        return real([sys.executable, "-c", _CHILD], **options)

    monkeypatch.setattr(job_child.subprocess, "Popen", start)
    made = JobChild(AGGREGATOR)
    yield made
    made.close()


def _answers(child: JobChild, jobs: list[str], now: float = 1000.0) -> list[dict[str, Any]]:
    got: list[dict[str, Any]] = []
    for job in jobs:
        child.submit({"job": job}, got.append)
    while len(got) < len(jobs):
        fd = child.fd
        assert fd is not None
        select.select([fd], [], [], 20)
        child.read(now)
    return got


def test_jobs_are_answered_in_order_by_one_child(child: JobChild) -> None:
    """Three jobs, one process."""
    answers = _answers(child, ["a", "b", "c"])
    assert [answer["job"] for answer in answers] == ["a", "b", "c"]
    assert {answer["pid"] for answer in answers} == {child.pid}


@pytest.mark.parametrize("job", ["die", "noise", "endless"])
def test_a_job_that_breaks_its_child_three_times_fails_and_the_next_one_works(child: JobChild, job: str) -> None:
    """A crash, words on the output that are no answer, an answer without an end."""
    first, second = _answers(child, [job, "good"])
    assert (first["ok"], first["code"]) == (False, "crashed")
    assert second["ok"]


def test_an_answer_to_another_job_is_ignored(child: JobChild) -> None:
    """Its id tells."""
    (answer,) = _answers(child, ["stale"])
    assert answer["ok"]


def test_a_child_that_was_warmed_up_stays_until_it_was_idle_for_long(child: JobChild) -> None:
    """Whatever the clock says at the start: 300 s count from the first look at it."""
    child.warm_up()
    pid = child.pid
    child.tick(1_000_000.0)
    child.tick(1_000_300.0)
    assert child.pid == pid
    (answer,) = _answers(child, ["a"], now=1_000_301.0)
    assert answer["pid"] == pid
    child.tick(1_000_601.0)
    assert child.pid == pid
    child.tick(1_000_602.0)
    assert child.pid is None


def test_forgotten_jobs_are_never_answered(child: JobChild) -> None:
    """The service started over: the job in flight and the one behind it are gone with their child."""
    got: list[dict[str, Any]] = []
    child.submit({"job": "a"}, got.append)
    child.submit({"job": "b"}, got.append)
    child.forget_jobs()
    assert child.pid is None
    (answer,) = _answers(child, ["c"])
    assert answer["job"] == "c"
    assert got == []


def test_a_child_that_died_while_idle_is_replaced(child: JobChild) -> None:
    """Somebody killed it between two rounds."""
    child.warm_up()
    assert child._process is not None
    child._process.kill()
    child._process.wait()
    (answer,) = _answers(child, ["a"])
    assert answer["ok"]


def test_a_long_job_for_a_child_that_does_not_read_yet_keeps_nobody_waiting(child: JobChild) -> None:
    """3 MB for a child that is stopped, as while it loads torch: more than its pipe takes; ticks bring the rest."""
    child.warm_up()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    got: list[dict[str, Any]] = []
    child.submit({"job": "long", "more": "x" * 3_000_000}, got.append)
    assert child._unsent
    os.kill(child.pid, signal.SIGCONT)
    while not got:
        child.tick(0.0)
        assert child.fd is not None
        select.select([child.fd], [], [], 0.01)
        child.read(0.0)
    assert (got[0]["ok"], got[0]["more"]) == (True, 3_000_000)
