"""A process that has loaded torch, so that each assignment is a fork of it: `python -m edge_client.worker.template FD`.

    FD     a socket of whole messages (SOCK_SEQPACKET) in JSON, as `template_messages` has them; where it ends, the
           template ends, and every worker with it
    in     `Fork`, with two descriptors: the pipe for progress, the log; `Prepare`
    out    `Ready` once everything is loaded, and again when it is prepared; for each `Fork` either `Forked`, with a
           descriptor of the process, or `Refused`; `Ended` for each worker

A fork takes milliseconds where a new process needs seconds to load torch, and shares the template's memory until it
writes to it. A thread does not survive a fork, and what it held stays locked for ever: the template therefore has one
thread, and refuses to fork with more. It loads code only: no data, no weights, no accelerator.
Covers: the process. Does not cover: an assignment (`process`), when there is a template (`client.warm_workers`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from edge_client import faults
from edge_client.device import guard
from edge_client.worker import process
from edge_client.worker.template_messages import (
    Ended,
    Fork,
    Forked,
    Prepare,
    Ready,
    Refused,
    receive,
    send,
)

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the socket ends; in a fork: do its assignment. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1 or not arguments[0].isdecimal():
        sys.stderr.write("usage: python -m edge_client.worker.template FD\n")
        return 2
    process.stand_guard()
    os.environ["OMP_NUM_THREADS"] = "1"  # read once, when torch is loaded; a worker sets its own number afterwards
    from edge_client.measuring import calibration  # noqa: F401
    from edge_client.methods.discovery import built_in
    from edge_client.worker import assignment  # noqa: F401

    built_in()  # imports the cards of all methods, which a worker looks its own up in
    _freeze()
    folder = _Template(socket.socket(fileno=int(arguments[0]))).serve()
    return process.carry_out(folder, is_fork=True) if folder is not None else 0


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # a collection in a worker would write to every object, and so copy the memory that it shares


class _Template:
    """The loop of the template; it returns in the template at its end, and in each worker at once."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._workers: dict[int, int] = {}  # descriptor of the process -> process id

    def serve(self) -> Path | None:
        """Answer messages until the socket ends (None); in a fork: the folder of its assignment."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the daemon has ended
            send(self._control, Ready())
            while True:
                control = self._control.fileno()
                ready, _, _ = select.select([control, *self._workers], [], [])
                for worker in [fd for fd in ready if fd != control]:
                    self._report(worker)
                if control in ready:
                    message, fds = receive(self._control, num_fds=2)
                    if isinstance(message, Prepare):
                        self._prepare(message)
                        continue
                    if not isinstance(message, Fork):
                        break
                    if self._fork(fds):
                        return Path(message.folder)
        return None

    def _prepare(self, message: Prepare) -> None:
        from edge_client.worker import preparation  # torch

        preparation.prepare(Path(message.run), message.slice, message.budget_bytes)
        _freeze()
        send(self._control, Ready())

    def _report(self, worker: int) -> None:
        """A worker has ended: say how."""
        pid = self._workers.pop(worker)
        _, status = os.waitpid(pid, 0)
        os.close(worker)
        send(self._control, Ended(pid=pid, code=os.waitstatus_to_exitcode(status)))

    def _fork(self, fds: Sequence[int]) -> bool:
        """Whether this is the new worker; `fds` are its pipe and its log."""
        progress, log = fds
        num_threads = len(os.listdir("/proc/self/task"))
        if num_threads != 1:
            send(self._control, Refused(reason=f"the template has {num_threads} threads, expected 1"))
            self._close(fds)
            return False
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._begin_worker(progress, log, template)
            return True
        self._close(fds)  # the end of the worker is the end of its pipe
        worker = os.pidfd_open(pid)
        self._workers[worker] = pid
        send(self._control, Forked(pid=pid), fds=[worker])
        return False

    def _begin_worker(self, progress: int, log: int, template: int) -> None:
        """What a new process would have got from whoever started it."""
        self._control.close()
        self._close(self._workers)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        os.set_inheritable(progress, True)
        os.environ |= {"FEDFIT_PROGRESS_FD": str(progress), "FEDFIT_PARENT_PID": str(template)}
        guard.die_with_parent(template)
        faults.load()

    @staticmethod
    def _close(fds: Sequence[int] | dict[int, int]) -> None:
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    guard.end(main())
