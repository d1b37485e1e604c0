"""The template of a device's workers as the daemon sees it: a process that forks a worker in milliseconds.

See also `edge_client.worker.template`, which is the process. Only Linux has what this needs: pidfds, sockets of whole
messages. Whatever goes wrong here, a worker can be started as a process of its own (`workers.spawn`).
Covers: its start, its end, its workers. Does not cover: whether there is to be one (`warm_workers`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from edge_client.errors import PayloadError
from edge_client.worker.template_messages import (
    Ended,
    Fork,
    Forked,
    Message,
    Prepare,
    Ready,
    Refused,
    receive,
    send,
)

__all__ = ["COMMAND", "ForkedWorker", "Template", "TemplateError"]

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "edge_client.worker.template")  # the socket's descriptor follows
_ANSWER_S = 5.0  # a fork takes milliseconds


class TemplateError(Exception):
    """The template did not fork; a process of its own does the work."""


class Template:
    """A running template, from its start to its end."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # what it cannot load, a worker of its own cannot either, and says so
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "FEDFIT_PARENT_PID": str(os.getpid())},
                )
            except OSError:
                ours.close()
                raise
        self._control = ours
        self._codes: dict[int, int] = {}  # process id -> exit code of workers that nobody has asked for yet
        self.is_ready = False
        self.has_ended = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def fd(self) -> int:
        """What to watch: it has become ready, or has ended."""
        return self._control.fileno()

    def read(self) -> None:
        """Take the messages that have arrived, without waiting."""
        while not self.has_ended and self._has_message(0.0):
            self._take()

    def prepare(self, run: Path, slice_name: str, budget_bytes: int) -> None:
        """Let it do once what the workers of a run have in common; it is not ready until that is done."""
        self.is_ready = False
        with contextlib.suppress(OSError):  # it has ended: `read` notices
            send(self._control, Prepare(run=str(run), slice=slice_name, budget_bytes=budget_bytes))

    def fork(self, folder: Path, *, progress: int, log_file: int) -> ForkedWorker:
        """A worker for the assignment in `folder`; raises `TemplateError`."""
        answer: Message | None = None
        fds: list[int] = []
        deadline = time.monotonic() + _ANSWER_S
        try:
            send(self._control, Fork(folder=str(folder)), fds=(progress, log_file))
            while not isinstance(answer, (Forked, Refused)):
                if not self._has_message(deadline - time.monotonic()):
                    raise TemplateError(f"it did not answer within {_ANSWER_S:g} s")
                answer, fds = self._take()
                if answer is None:
                    raise TemplateError("it has ended")
        except OSError as error:
            raise TemplateError(f"it does not listen: {error.strerror}") from error
        if isinstance(answer, Refused):
            raise TemplateError(answer.reason)
        return ForkedWorker(answer.pid, fds[0], self)

    def code_of(self, pid: int, timeout_s: float | None) -> int | None:
        """The exit code of a worker once it has ended; None if it has not within `timeout_s` (None: wait for it)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._codes:
            if self.has_ended:
                return -signal.SIGKILL  # the kernel ended it together with the template
            if not self._has_message(None if deadline is None else deadline - time.monotonic()):
                return None
            self._take()
        return self._codes.pop(pid)

    def end(self) -> None:
        """End it, and every worker of it."""
        self._process.kill()
        self._process.wait()
        self._control.close()
        self.has_ended, self.is_ready = True, False

    def _has_message(self, timeout_s: float | None) -> bool:
        if self.has_ended:
            return False
        return bool(select.select([self._control], [], [], None if timeout_s is None else max(0.0, timeout_s))[0])

    def _take(self) -> tuple[Message | None, list[int]]:
        """The next message; None at the end of the socket, or if it makes no sense: the template has ended."""
        message: Message | None = None
        fds: list[int] = []
        with contextlib.suppress(OSError, ValueError, PayloadError):
            message, fds = receive(self._control)
        match message:
            case None:
                self.end()
            case Ready():
                self.is_ready = True
            case Ended():
                self._codes[message.pid] = message.code
        return message, fds


class ForkedWorker:
    """A worker that is a fork of a template, with what `workers.Worker` uses of `subprocess.Popen`."""

    def __init__(self, pid: int, pidfd: int, template: Template) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._template = template
        self._code: int | None = None

    def send_signal(self, number: int) -> None:
        """Send a signal to it, and to no other process, unless its end was seen."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code once it has ended, or minus the signal; raises `subprocess.TimeoutExpired`."""
        if self._code is None:
            code = self._template.code_of(self.pid, timeout)
            if code is None:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            self._code = code
            os.close(self._pidfd)
        return self._code
