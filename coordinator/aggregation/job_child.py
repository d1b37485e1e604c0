"""A child process that does one job after another, and its handle in the parent's loop.

The aggregator is such a child, the workers of a simulation are others. A child that dies is replaced. It stays between
its jobs, because loading torch takes longer than a small round, and ends when it was idle for a while. A job that kills
its child repeatedly is answered with a failure, so that one update cannot stop a federation.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from coordinator.aggregation.jobs import (
    AnswerLine,
    Failure,
    Job,
    answer_line,
    encode_job,
    is_small,
    name_of,
    read_answer,
)
from edge_client.errors import PayloadError

__all__ = ["JobChild", "aggregator", "answer_jobs"]

log = logging.getLogger(__name__)

_MAX_TRIES = 3
_IDLE_S = 300.0
_MAX_ANSWER_BYTES = 1 << 20
_MAX_SENT = 32  # small jobs that the child has at a time: it does not wait for the loop after each
_PIPE_BYTES = 1 << 20  # holds the fold of some thousand devices

A = TypeVar("A")


class _Queued(NamedTuple):
    """A job that waits for its answer."""

    number: int
    job: Job[Any]
    then: Callable[[Any], None]


class JobChild:
    """A child process and its queue of jobs.

    For one loop, which watches `fd`, calls `read` when it is readable, and `tick` from time to time.
    """

    def __init__(self, module: str, *, name: str, environment: Mapping[str, str] | None = None) -> None:
        """`python -m module` must call `answer_jobs`; the log calls the child `name`, such as `the aggregator`."""
        self._module = module
        self._name = name
        self._environment = environment
        self._jobs: deque[_Queued] = deque()
        self._deaths = 0  # of the child, during the first job
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._num_sent = 0  # of the first jobs: the child has them
        self._rest = b""
        self._unsent = b""  # of the jobs that were sent: a child that still loads torch reads nothing
        self._used_at: float | None = None

    @property
    def fd(self) -> int | None:
        """The descriptor to watch; None while no child runs."""
        return self._process.stdout.fileno() if self._process and self._process.stdout else None

    @property
    def pid(self) -> int | None:
        """The child's process id; None while no child runs."""
        return self._process.pid if self._process else None

    @property
    def idle(self) -> bool:
        """Whether it has no job."""
        return not self._jobs

    def warm_up(self) -> None:
        """Start the child before it is needed."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **self._environment} if self._environment is not None else None,
                start_new_session=True,  # Ctrl-C in the terminal reaches the parent alone, which ends the child
            )
            assert self._process.stdout is not None
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdout.fileno(), False)
            os.set_blocking(self._process.stdin.fileno(), False)
            if sys.platform == "linux":
                with contextlib.suppress(PermissionError):  # of a user with too many pipes: it takes more writes
                    fcntl.fcntl(self._process.stdin.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self._rest = self._unsent = b""
            self._used_at = None

    def submit(self, job: Job[A], then: Callable[[A | Failure], None]) -> None:
        """Queue a job; `read` calls `then` with its answer."""
        self._number += 1
        self._jobs.append(_Queued(self._number, job, then))
        if not self._num_sent:
            self._send_some()

    def forget_jobs(self) -> None:
        """Drop all jobs; a child that works on one is ended."""
        if self._num_sent:
            self.close()
        self._jobs.clear()
        self._deaths = 0

    def _send_some(self) -> None:
        """Send the next job; of small ones all that wait, as far as the child is to have them at a time.

        The child answers in the order of the jobs, so the first one without an answer is the one that ended it.
        """
        if not self._jobs or self._num_sent > _MAX_SENT // 2:
            return
        lines: list[bytes] = []
        for queued in islice(self._jobs, self._num_sent, _MAX_SENT):
            if (self._num_sent or lines) and not (is_small(queued.job) and is_small(self._jobs[0].job)):
                break
            lines.append(encode_job(queued.number, queued.job))
        if lines:
            self.warm_up()
            self._num_sent += len(lines)
            self._unsent += b"".join(lines)
            self._flush()

    def _flush(self) -> None:
        """Write as much as the child's pipe takes; the loop never waits for it."""
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the next tick continues; `read` notices a death
            while self._unsent:
                written = os.write(self._process.stdin.fileno(), self._unsent)
                self._unsent = self._unsent[written:]

    def read(self, now: float) -> None:
        """Take the child's answers, or notice that it died."""
        fd = self.fd
        if fd is None:
            return
        self._used_at = now
        try:
            piece = os.read(fd, 65_536)
        except BlockingIOError:
            return
        if not piece:
            self._died()
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        try:
            if len(self._rest) > _MAX_ANSWER_BYTES:
                raise ValueError(f"a line of more than {_MAX_ANSWER_BYTES} bytes")
            answers = [read_answer(line) for line in lines]
        except ValueError as error:
            self._distrust(error)
            return
        process = self._process
        for answer in answers:
            if self._process is process:  # no answer of a child counts once it is distrusted
                self._answered(answer)
        self._send_some()

    def _answered(self, line: AnswerLine) -> None:
        if not self._jobs or line.number != self._jobs[0].number:
            return
        try:
            answer = line.answer_to(self._jobs[0].job)
        except PayloadError as error:
            self._distrust(error)
            return
        queued = self._jobs.popleft()
        self._num_sent -= 1
        self._deaths = 0
        queued.then(answer)

    def _distrust(self, error: Exception) -> None:
        """Replace a child whose output is no answer, such as a library's message: the rest cannot be trusted either."""
        log.error("%s answered with something else than JSON (%s)", self._name, error)
        assert self._process is not None
        self._process.kill()
        self._died()

    def _died(self) -> None:
        code = self._reap()
        if not self._num_sent:
            return
        self._num_sent = 0
        self._deaths += 1
        job = self._jobs[0].job
        log.warning("%s ended with code %s during %r (try %d)", self._name, code, name_of(job), self._deaths)
        if self._deaths >= _MAX_TRIES:
            queued = self._jobs.popleft()
            self._deaths = 0
            queued.then(Failure(code="crashed", detail=f"{self._name} crashed {_MAX_TRIES} times on it"))
        if not self._num_sent:
            self._send_some()

    def _reap(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return process.wait()

    def tick(self, now: float) -> None:
        """Write the rest of a long job, and end a child that was idle for long, to free its memory."""
        self._flush()
        if self._process is None or self._jobs:
            return
        if self._used_at is None:
            self._used_at = now
        if now - self._used_at > _IDLE_S:
            self._reap()

    def close(self) -> None:
        """Kill the child."""
        if self._process is not None:
            self._process.kill()
            self._reap()
        self._num_sent = 0


def aggregator() -> JobChild:
    """The child that does all jobs on the values of models."""
    return JobChild("coordinator.aggregation.process", name="the aggregator")


def answer_jobs(do: Callable[[Job[Any]], object]) -> None:
    """The child's side: answer every line of the standard input until it ends.

    Standard output carries answers alone; what libraries print there goes to standard error.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)
        for line in sys.stdin:
            answered = answer_line(line, do)
            try:
                stream.write(answered)
                stream.flush()
            except BrokenPipeError:  # the parent died before we asked to die with it; closing would flush again
                os._exit(0)
