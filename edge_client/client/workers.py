"""Worker processes as the daemon sees them: started in a folder, watched through a pipe, ended on request.

A worker gets `order.json`, writes lines of progress into the pipe and its update into the folder, and exits with one of
`edge_client.worker.exit_codes`. See also `edge_client.worker.process`, `edge_client.client.worker_outcome`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from edge_client import durable
from edge_client.client.events import Event, WorkerDone, WorkerProgress
from edge_client.client.instructions import Start
from edge_client.client.worker_outcome import finished_update, last_lines, outcome
from edge_client.device.watch import count_oom_kills, killed_for_memory
from edge_client.errors import PayloadError
from edge_client.records import Ceiling, Count, Matches, WorkOrder, from_map, to_map
from edge_client.worker import exit_codes, live_files

__all__ = ["COMMAND", "Launch", "Worker", "WorkerProcess", "spawn", "write_order"]

COMMAND = (sys.executable, "-m", "edge_client.worker.process")  # the folder follows
_GRACE_S = 5.0


def write_order(
    instruction: Start,
    *,
    folder: Path,
    parts: Mapping[str, str],
    device: str,
    device_file: Mapping[str, Any],
    budget_bytes: int,
    training_budget_bytes: int | None = None,
    ceilings: Mapping[str, int],
    accelerator_ceilings: tuple[Ceiling, ...] = (),
    method_state: Path,
    ledger: Path,
    phases: Mapping[str, float] = {},
) -> None:
    """Make the folder of an assignment, with `order.json` in it; `phases` are the seconds of what has been done."""
    assign = instruction.assign
    durable.make_dir(folder)
    (folder / "error.json").unlink(missing_ok=True)
    live_files.clear(folder)
    order = WorkOrder(
        lease=assign.lease,
        run=assign.run,
        round=assign.round,
        num_rounds=assign.num_rounds,
        train=assign.train,
        evaluate=assign.evaluate,
        seed=assign.seed,
        learning_rate=assign.learning_rate,
        threads=assign.threads,
        slice=assign.slice,
        plan=assign.plan,
        budget_bytes=budget_bytes,
        training_budget_bytes=training_budget_bytes,
        ceiling_bytes=instruction.ceiling_bytes,
        ceilings=ceilings,
        accelerator_ceilings=accelerator_ceilings,
        replans=instruction.replans,
        device=device,
        parts=parts,
        device_file=device_file,
        method_state=str(method_state),
        ledger=str(ledger),
        phases=phases,
        starts_at=time.monotonic(),
    )
    (folder / "order.json").write_text(json.dumps(to_map(order)), encoding="utf-8")


class WorkerProcess(Protocol):
    """The process of a worker: one of its own (`subprocess.Popen`), or a fork (`template.ForkedWorker`)."""

    pid: int

    def send_signal(self, number: int, /) -> None:
        """Send a signal to it."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus the signal that ended it; raises `subprocess.TimeoutExpired`."""


Launch = Callable[[Path, int, int], WorkerProcess]  # (folder, descriptor of the pipe, of the log)


def spawn(folder: Path, progress: int, log: int, command: Sequence[str] = COMMAND) -> WorkerProcess:
    """Start a worker in a process of its own."""
    return subprocess.Popen(
        [*command, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(progress,),
        env={**os.environ, "FEDFIT_PROGRESS_FD": str(progress), "FEDFIT_PARENT_PID": str(os.getpid())},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProgressLine:
    """A line of progress, as the worker writes it."""

    phase: Annotated[str, Matches(r"[a-z_]{0,16}")]
    step: Count
    total: Count
    loss: float | None


class Worker:
    """A running worker."""

    def __init__(self, lease: str, folder: Path, launch: Launch = spawn, *, root: Path = Path("/")) -> None:
        """`launch` starts its process; `root` is where the system's `/proc` is, to know what the kernel killed."""
        self.lease = lease
        self._folder = folder
        self._root = root
        self._oom_kills = count_oom_kills(root)
        self._rest = b""
        self.num_lines = 0  # of progress, so far
        self._kill_at: float | None = None
        self.is_ending = False  # its update is complete, and its process may not have ended yet
        self.needs_own_process = False  # it has ended, because it was the fork of a template
        (folder / "error.json").unlink(missing_ok=True)
        live_files.clear(folder)
        self.progress_fd, write_fd = os.pipe()
        os.set_blocking(self.progress_fd, False)
        try:
            with open(folder / "log.txt", "wb") as log_file:
                self._process = launch(folder, write_fd, log_file.fileno())
        except OSError:
            os.close(self.progress_fd)
            raise
        finally:
            os.close(write_fd)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def cpu_seconds(self) -> float | None:
        """CPU time that it has used; None where the system does not tell."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
            user, system = text.rpartition(")")[2].split()[11:13]  # behind its name, which may be anything
        except (OSError, ValueError):
            return None
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def read(self) -> tuple[list[Event], bool]:
        """Events since the last call, and whether the worker has done all it will do (its last event says how).

        A worker whose update is complete has; its process may still be ending (`is_ending`, `has_gone`).
        """
        is_over = self._read_pipe()
        events = self._progress()
        if is_over:
            return [*events, self._ended()], True
        update = finished_update(self._folder) if self._has_written(events) else None
        if update is None:
            return events, False
        self.is_ending = True
        return [*events, WorkerDone(self.lease, update)], True

    def _read_pipe(self) -> bool:
        """Read what has come; whether that was the end."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.progress_fd, 65_536):
                self._rest = (self._rest + piece)[-65_536:]
            return True
        return False

    @staticmethod
    def _has_written(events: Sequence[Event]) -> bool:
        """Whether the last line of progress says that the update is complete; its manifest is there before."""
        last = events[-1] if events else None
        return isinstance(last, WorkerProgress) and last.phase == "write" and last.step == last.total

    def has_gone(self) -> bool:
        """Whether a process that `is_ending` has ended; it is then forgotten."""
        if not self._read_pipe():
            return False
        os.close(self.progress_fd)
        self._process.wait()
        return True

    def _progress(self) -> list[Event]:
        *lines, self._rest = self._rest.split(b"\n")
        self.num_lines += len(lines)
        events: list[Event] = []
        for line in lines[-1:]:  # only the newest matters
            with contextlib.suppress(ValueError, RecursionError, PayloadError):
                progress = from_map(_ProgressLine, json.loads(line))
                events.append(WorkerProgress(progress.phase, progress.step, progress.total, progress.loss))
        return events

    def _ended(self) -> Event:
        os.close(self.progress_fd)
        code = self._process.wait()
        self.needs_own_process = code == exit_codes.NOT_AS_FORK
        for_memory = self._kill_at is None and killed_for_memory(code, self._oom_kills, self._root)
        return outcome(self.lease, self._folder, code, killed_for_memory=for_memory)

    def accelerator_bytes(self) -> int:
        """What it has of memory that an accelerator shares with the host, as it says itself: nobody else sees it."""
        return live_files.read_use(self._folder)

    def write_budget(self, budget_bytes: int) -> None:
        """Give the worker a smaller budget: it makes a new plan before its next batch."""
        live_files.write_budget(self._folder, budget_bytes)

    def plan(self) -> str:
        """How the worker trains, as text; empty until it has a plan."""
        trial = live_files.read_trial(self._folder)
        return trial.plan.describe() if trial is not None else ""

    def warnings(self) -> list[str]:
        """The warnings at the end of its log, such as images that cannot be read; the log is removed with the lease."""
        return [line for line in last_lines(self._folder / "log.txt") if line.startswith("WARNING ")]

    def stop(self, now: float) -> None:
        """Ask the worker to end, from any thread; `overdue` says when to kill it."""
        if self._kill_at is None:
            self._kill_at = now + _GRACE_S
            self._process.terminate()

    def overdue(self, now: float) -> bool:
        """Whether the worker was asked to end and did not in time, so that it must be killed."""
        if self._kill_at is None or now < self._kill_at:
            return False
        self._process.kill()
        return True

    def kill(self) -> None:
        """Kill the worker; its result does not matter."""
        self._process.kill()
        self._process.wait()
        os.close(self.progress_fd)

    def wait(self, now: float) -> None:
        """Wait until the worker has ended, at most for the rest of the grace period since `stop`."""
        try:
            self._process.wait(max(0.0, (self._kill_at or now) - now))
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        os.close(self.progress_fd)
