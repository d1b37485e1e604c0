"""A child process that does jobs, and how the loop sees it: jobs in, answers out, one at a time; a new one if it dies.

The aggregator is one, the workers of a simulation are others. A child stays between its jobs, because loading torch
takes longer than a small round, and ends when nobody needed it for a while. A job that kills its child again and again
is answered as failed, so that one update cannot stop a federation.
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
from typing import Any, NamedTuple, TypeVar

from coordinator.aggregation.jobs import AnswerLine, Failure, Job, answer_line, encode_job, name_of, read_answer
from edge_client.errors import PayloadError

__all__ = ["JobChild", "aggregator", "answer_jobs"]

log = logging.getLogger(__name__)

_MAX_TRIES = 3
_IDLE_S = 300.0
_MAX_ANSWER_BYTES = 1 << 20
_PIPE_BYTES = 1 << 20  # holds the fold of some thousand devices

A = TypeVar("A")


class _Queued(NamedTuple):
    number: int
    job: Job[Any]
    then: Callable[[Any], None]


class JobChild:
    """Used by one loop only; `fd` is to be watched, `read` called when it is readable."""

    def __init__(self, module: str, *, name: str, environment: Mapping[str, str] | None = None) -> None:
        """`python -m module` calls `answer_jobs`; people read `name` in the log, such as `the aggregator`."""
        self._module = module
        self._name = name
        self._environment = environment
        self._jobs: deque[_Queued] = deque()
        self._tries = 0
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._in_flight = False
        self._rest = b""
        self._unsent = b""  # of the job in flight: a child that still loads torch reads nothing
        self._used_at: float | None = None

    @property
    def fd(self) -> int | None:
        """What to watch."""
        return self._process.stdout.fileno() if self._process and self._process.stdout else None

    @property
    def pid(self) -> int | None:
        """The child's process id."""
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
        self._send_next()

    def forget_jobs(self) -> None:
        """Nobody waits for answers any more; the one in flight is dropped with its child."""
        if self._in_flight:
            self.close()
        self._jobs.clear()
        self._tries = 0

    def _send_next(self) -> None:
        if self._in_flight or not self._jobs:
            return
        self.warm_up()
        self._in_flight = True
        self._tries += 1
        self._unsent = encode_job(self._jobs[0].number, self._jobs[0].job)
        self._flush()

    def _flush(self) -> None:
        """Give the child what its pipe takes; the loop never waits for it."""
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the next tick goes on; a death `read` finds out
            while self._unsent:
                written = os.write(self._process.stdin.fileno(), self._unsent)
                self._unsent = self._unsent[written:]

    def read(self, now: float) -> None:
        """Take what the child answered, or notice that it died."""
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
            if self._process is process:  # nothing that a child said counts once it is not trusted
                self._answered(answer)

    def _answered(self, line: AnswerLine) -> None:
        if not self._jobs or line.number != self._jobs[0].number:
            return
        try:
            answer = line.answer_to(self._jobs[0].job)
        except PayloadError as error:
            self._distrust(error)
            return
        queued = self._jobs.popleft()
        self._in_flight = False
        self._tries = 0
        queued.then(answer)
        self._send_next()

    def _distrust(self, error: Exception) -> None:
        """A library wrote to the child's output: what follows cannot be trusted either."""
        log.error("%s answered with something else than JSON (%s)", self._name, error)
        assert self._process is not None
        self._process.kill()
        self._died()

    def _died(self) -> None:
        code = self._reap()
        if not self._in_flight:
            return
        self._in_flight = False
        job = self._jobs[0].job
        log.warning("%s ended with code %s during %r (try %d)", self._name, code, name_of(job), self._tries)
        if self._tries >= _MAX_TRIES:
            queued = self._jobs.popleft()
            self._tries = 0
            queued.then(Failure(code="crashed", detail=f"{self._name} crashed {_MAX_TRIES} times on it"))
        self._send_next()

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
        """Give a child the rest of a long job; let an idle one go: its memory belongs to others."""
        self._flush()
        if self._process is None or self._jobs:
            return
        if self._used_at is None:
            self._used_at = now
        if now - self._used_at > _IDLE_S:
            self._reap()

    def close(self) -> None:
        """End the child, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._reap()
        self._in_flight = False


def aggregator() -> JobChild:
    """The child that does all jobs with values of models."""
    return JobChild("coordinator.aggregation.process", name="the aggregator")


def answer_jobs(do: Callable[[Job[Any]], object]) -> None:
    """The child's side: answer every line of the standard input, until it ends.

    The real standard output is kept for answers; whatever else prints goes to standard error.
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
