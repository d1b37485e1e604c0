"""The worker processes that the virtual devices of a simulation share: each does one assignment after another.

First come, first served. A device gets back what a worker of its own would have answered.
Does not cover: the work (`coordinator.simulation.worker`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.aggregation.job_child import JobChild
from coordinator.aggregation.jobs import Failure, WorkerExit, WorkJob
from edge_client.client.events import Event, WorkerFailed
from edge_client.client.worker_outcome import outcome

__all__ = ["WORKER", "WorkerPool"]

WORKER = "coordinator.simulation.worker"

Done = Callable[[Event], None]


class WorkerPool:
    """Worker processes for the simulation's loop, which watches `fds` and calls `read` with the readable ones."""

    def __init__(self, num: int, *, threads: int = 1, module: str = WORKER) -> None:
        """`num` processes with `threads` threads each; they start when they are needed, or at `warm_up`."""
        environment = {"FEDFIT_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": str(threads)}
        self._children = [JobChild(module, name="the worker", environment=environment) for _ in range(num)]
        self._waiting: deque[tuple[str, Path, Done]] = deque()

    def warm_up(self) -> None:
        """Let all processes load torch."""
        for child in self._children:
            child.warm_up()

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self._children)

    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return [child.pid for child in self._children if child.pid is not None]

    def submit(self, lease: str, folder: Path, done: Done) -> None:
        """Do the assignment in `folder`; `done` gets its end from inside `read`."""
        self._waiting.append((lease, folder, done))
        self._give_out()

    def forget(self, lease: str) -> None:
        """Drop a waiting assignment; one that has begun ends by itself."""
        self._waiting = deque(item for item in self._waiting if item[0] != lease)

    def _give_out(self) -> None:
        for child in self._children:
            if child.idle and self._waiting:
                lease, folder, done = self._waiting.popleft()
                self._start(child, lease, folder, done)

    def _start(self, child: JobChild, lease: str, folder: Path, done: Done) -> None:
        def ended(answer: WorkerExit | Failure) -> None:
            if isinstance(answer, Failure):
                done(WorkerFailed(lease=lease, code="crashed", detail=answer.detail, final=True))
            else:
                done(outcome(lease, folder, answer.code))

        child.submit(WorkJob(folder=str(folder)), ended)

    def fds(self) -> list[int]:
        """What to watch."""
        return [child.fd for child in self._children if child.fd is not None]

    def read(self, ready: Sequence[int], now: float) -> None:
        """Take the answers that are there, and give out what waits."""
        for child in self._children:
            if child.fd in ready:
                child.read(now)
        self._give_out()

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        self._waiting.clear()
        for child in self._children:
            child.forget_jobs()
            child.close()
