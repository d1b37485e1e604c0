"""Worker processes as the daemon sees them: started in a folder, watched through a pipe, ended on request.

A worker gets `order.json`, writes progress lines into the pipe and its update into the folder, and exits: 0 done,
74 disk full, 75 over its budget, 76 declined, 143 told to stop; anything else is a crash, unless the kernel killed it
for want of memory. See `edge_client.worker.process`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from edge_client import durable
from edge_client.client.session import Event, Finished, Start, WorkerDone, WorkerFailed, WorkerProgress
from edge_client.device.watch import count_oom_kills, killed_for_memory
from edge_client.errors import PayloadError
from edge_client.records import Count, Hash, Matches, WorkOrder, check_value, from_map, to_map
from edge_client.worker import exit_codes
from edge_client.worker import live_files as notes
from edge_client.worker.received_model import STORED_STATE

__all__ = [
    "COMMAND",
    "Stall",
    "Worker",
    "count_method_state",
    "done",
    "ended",
    "finished_update",
    "left_failure",
    "settle_method_state",
    "start",
    "write_order",
]

COMMAND = (sys.executable, "-m", "edge_client.worker.process")  # the folder follows
_GRACE_S = 5.0
_LOG_LINES = 20


def start(
    wanted: Start,
    *,
    folder: Path,
    parts: Mapping[str, str],
    device: str,
    device_file: Mapping[str, Any],
    budget_bytes: int,
    ceilings: Mapping[str, int],
    method_state: Path,
    ledger: Path,
    command: Sequence[str] = COMMAND,
    root: Path = Path("/"),
) -> Worker:
    """Start the worker of an assignment in its folder."""
    durable.make_dir(method_state)
    write_order(
        wanted,
        folder=folder,
        parts=parts,
        device=device,
        device_file=device_file,
        budget_bytes=budget_bytes,
        ceilings=ceilings,
        method_state=method_state,
        ledger=ledger,
    )
    return Worker(wanted.assign.lease, folder, command, root=root)


def write_order(
    wanted: Start,
    *,
    folder: Path,
    parts: Mapping[str, str],
    device: str,
    device_file: Mapping[str, Any],
    budget_bytes: int,
    training_budget_bytes: int | None = None,
    ceilings: Mapping[str, int],
    method_state: Path,
    ledger: Path,
) -> None:
    """Make the folder of an assignment with all that a worker is told."""
    assign = wanted.assign
    durable.make_dir(folder)
    (folder / "error.json").unlink(missing_ok=True)
    notes.clear(folder)
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
        ceiling_bytes=wanted.ceiling_bytes,
        ceilings=ceilings,
        replans=wanted.replans,
        device=device,
        parts=parts,
        device_file=device_file,
        method_state=str(method_state),
        ledger=str(ledger),
    )
    (folder / "order.json").write_text(json.dumps(to_map(order)), encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """A line of progress."""

    phase: Annotated[str, Matches(r"[a-z_]{0,16}")]
    step: Count
    total: Count
    loss: float | None


class Worker:
    """A running worker."""

    def __init__(self, lease: str, folder: Path, command: Sequence[str] = COMMAND, *, root: Path = Path("/")) -> None:
        """`root` is where the system's `/proc` is, to know what the kernel killed."""
        self.lease = lease
        self._folder = folder
        self._root = root
        self._oom_kills = count_oom_kills(root)
        self._rest = b""
        self.num_lines = 0  # of progress, so far
        self._kill_at: float | None = None
        (folder / "error.json").unlink(missing_ok=True)
        notes.clear(folder)
        self.progress_fd, write_fd = os.pipe()
        os.set_blocking(self.progress_fd, False)
        try:
            with open(folder / "log.txt", "wb") as log_file:
                self._process = subprocess.Popen(
                    [*command, str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    pass_fds=(write_fd,),
                    env={**os.environ, "FEDFIT_PROGRESS_FD": str(write_fd), "FEDFIT_PARENT_PID": str(os.getpid())},
                )
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
        """Events since the last call, and whether the worker has ended (its last event says how)."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.progress_fd, 65_536):
                self._rest = (self._rest + piece)[-65_536:]
            return [*self._progress(), self._ended()], True
        return self._progress(), False

    def _progress(self) -> list[Event]:
        *lines, self._rest = self._rest.split(b"\n")
        self.num_lines += len(lines)
        events: list[Event] = []
        for line in lines[-1:]:  # only the newest matters
            with contextlib.suppress(ValueError, RecursionError, PayloadError):
                told = from_map(_Told, json.loads(line))
                events.append(WorkerProgress(told.phase, told.step, told.total, told.loss))
        return events

    def _ended(self) -> Event:
        os.close(self.progress_fd)
        code = self._process.wait()
        for_memory = self._kill_at is None and killed_for_memory(code, self._oom_kills, self._root)
        return ended(self.lease, self._folder, code, for_memory=for_memory)

    def tell_budget(self, budget_bytes: int) -> None:
        """There is less memory now: it plans anew before its next batch."""
        notes.tell_budget(self._folder, budget_bytes)

    def plan(self) -> str:
        """How it trains, for people; empty before it has told."""
        trial = notes.read_trial(self._folder)
        return trial.plan.describe() if trial is not None else ""

    def warnings(self) -> list[str]:
        """What its log warns of at the end, such as images that cannot be read; the log goes with the lease."""
        return [line for line in _last_lines(self._folder / "log.txt") if line.startswith("WARNING ")]

    def stop(self, now: float) -> None:
        """Ask it to end; `overdue` tells when to insist. From any thread."""
        if self._kill_at is None:
            self._kill_at = now + _GRACE_S
            self._process.terminate()

    def overdue(self, now: float) -> bool:
        """Whether it was asked to end and did not in time; it is killed then."""
        if self._kill_at is None or now < self._kill_at:
            return False
        self._process.kill()
        return True

    def kill(self) -> None:
        """End it now and do not look back."""
        self._process.kill()
        self._process.wait()
        os.close(self.progress_fd)

    def wait(self, now: float) -> None:
        """Wait until it has ended, at most what is left of the grace period since `stop`."""
        try:
            self._process.wait(max(0.0, (self._kill_at or now) - now))
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        os.close(self.progress_fd)


class Stall:
    """Tells a worker that hangs from one that is slow: it says nothing and uses no CPU time, for long.

    A disk that does not answer, a task's code that waits for ever: training, measuring and reading all use CPU time.
    """

    AFTER_S = 600
    _MOVED_S = 1.0  # less is what a waiting process uses, too
    _LOOK_EVERY_S = 10.0

    def __init__(self) -> None:
        self._pid = 0
        self._seen: tuple[int, float] = (0, 0.0)  # lines that it said, CPU seconds
        self._since = self._look_at = 0.0

    def hangs(self, worker: Worker, now: float) -> bool:
        """Whether it has done nothing for `AFTER_S`; asked at any time, told once for each such time."""
        if worker.pid == self._pid and now < self._look_at:
            return False
        self._look_at = now + self._LOOK_EVERY_S
        lines, cpu_s = worker.num_lines, worker.cpu_seconds()
        moved = cpu_s is None or lines != self._seen[0] or cpu_s - self._seen[1] >= self._MOVED_S
        if worker.pid != self._pid or moved or now - self._since >= self.AFTER_S:
            hung = worker.pid == self._pid and not moved
            self._pid, self._seen, self._since = worker.pid, (lines, cpu_s or 0.0), now
            return hung
        return False


def ended(lease: str, folder: Path, code: int, *, for_memory: bool = False) -> Event:
    """What became of a worker that ended with this exit code; `for_memory`: the system killed it to have memory."""
    finished = finished_update(folder) if code == 0 else None
    if finished is not None:
        return done(lease, finished)
    told = _read_json(folder / "error.json") or {}
    trial = notes.read_trial(folder)
    exceeded = trial.exceeded() if trial is not None else None
    if exceeded is not None and for_memory:
        code, told = exit_codes.OVER_BUDGET, {"detail": "the system was out of memory and killed the worker"}
    kind = {exit_codes.OVER_BUDGET: "over_budget", exit_codes.DISK: "disk_full"}.get(code, "crashed")
    over = code == exit_codes.OVER_BUDGET
    return WorkerFailed(
        lease=lease,
        code=_declined_code(told) if code == exit_codes.DECLINED else kind,
        detail=_sendable(str(told.get("detail", f"the worker ended with exit code {code}")), 2000),
        log=_last_lines(folder / "log.txt"),
        final=code == exit_codes.DECLINED or (over and exceeded is None),
        exceeded=exceeded if over else None,
    )


def done(lease: str, update: Finished) -> WorkerDone:
    """The event that a finished update makes."""
    return WorkerDone(lease, update)


def finished_update(folder: Path) -> Finished | None:
    """The update that a worker left in its folder, if it is whole."""
    told = _read_json(folder / "update.json")
    if told is None:
        return None
    try:
        sha256 = check_value(Hash, told.get("sha256"), "update.sha256")
        length = check_value(int, told.get("length"), "update.length")
        num_samples = check_value(int, told.get("num_samples"), "update.num_samples")
    except PayloadError:
        return None
    binary = folder / "update.bin"
    if not binary.exists() or binary.stat().st_size != length:
        return None
    return Finished(sha256=sha256, length=length, num_samples=num_samples)


def left_failure(lease: str, folder: Path) -> WorkerFailed | None:
    """A worker that went over its budget just before the daemon died; what else it may have died of is tried again."""
    told, trial = _read_json(folder / "error.json"), notes.read_trial(folder)
    exceeded = trial.exceeded() if trial is not None else None
    if told is None or told.get("code") != "over_budget" or exceeded is None:
        return None
    detail = _sendable(str(told.get("detail")), 2000)
    return WorkerFailed(lease=lease, code="over_budget", detail=detail, exceeded=exceeded)


def settle_method_state(root: Path, lease: str, *, accepted: bool) -> None:
    """Keep what the method wrote as `next` with the lease of its update, or drop it.

    A stored update may still not count: its round may be abandoned. `count_method_state` knows.
    """
    for following in root.glob("*/next"):
        if accepted:
            durable.publish(following, following.with_name(STORED_STATE + lease), point="daemon.state")
        else:
            following.unlink()
            durable.sync_dir(following.parent)


def count_method_state(folder: Path, counted: str | None, *, in_hand: str | None = None) -> None:
    """What was kept with the lease that went into a model becomes `current`; all else would be applied twice.

    `in_hand`: a lease whose update is finished; whether it counts is not known yet.
    """
    for stored in folder.glob(f"{STORED_STATE}*"):
        if stored.name == f"{STORED_STATE}{in_hand}":
            continue
        if stored.name == f"{STORED_STATE}{counted}":
            durable.publish(stored, folder / "current", point="daemon.counted")
        else:
            stored.unlink()
            durable.sync_dir(folder)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _last_lines(path: Path) -> tuple[str, ...]:
    """The end of a worker's log, short enough to travel."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(_sendable(line, 300) for line in text.splitlines()[-_LOG_LINES:])


def _sendable(text: str, limit_bytes: int) -> str:
    """As much of a text as may travel: a message is small, and a file name in it need not be valid UTF-8."""
    return text.encode("utf-8", "replace")[:limit_bytes].decode("utf-8", "ignore")


def _declined_code(told: Mapping[str, Any]) -> str:
    code = str(told.get("code"))
    return code if re.fullmatch(r"[a-z0-9_]{1,32}", code) else "declined"
