"""One assignment in a process of its own: `python -m edge_client.worker.process WORKDIR`.

    in    WORKDIR/order.json (`records.WorkOrder`); the blobs that it names
    out   WORKDIR/update.bin, then update.json {sha256, length, num_samples}; or error.json {code, detail}
    both  WORKDIR/plan.json, budget.json: the plan in force, and a smaller budget (`live_files`)
    env   FEDFIT_PROGRESS_FD: JSON lines {phase, step, total, loss} go there; FEDFIT_PARENT_PID: whom to die with
    exit  0 done | 74 disk | 75 over budget | 76 declined | 77 not as a fork | 143 SIGTERM | 1 a bug, or another worker
          on the same lease

Covers: the process, its guards, its exit. Does not cover: the work itself (`assignment`), imported only when the guards
are in place, because malloc must be pinned before torch is loaded. A killed worker starts again from the beginning.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client import durable, faults
from edge_client.device import accelerator_environment, guard
from edge_client.errors import (
    DiskFullError,
    MachineError,
    PayloadError,
    is_out_of_accelerator_memory,
    is_out_of_memory,
    torch_failure,
)
from edge_client.records import WorkOrder, from_map
from edge_client.worker import exit_codes, live_files

if TYPE_CHECKING:
    from edge_client.worker.process_cache import ProcessCache

__all__ = ["attempt", "carry_out", "main", "stand_guard"]

_log = logging.getLogger(__name__)

_LOCK_WAIT_S = 5.0
_LOCK_POLL_S = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Run one assignment; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m edge_client.worker.process WORKDIR\n")
        return 2
    stand_guard()
    return carry_out(Path(arguments[0]))


def carry_out(workdir: Path, *, is_fork: bool = False) -> int:
    """Do the one assignment of this process, unless another worker does it; returns the exit code."""
    if not _lock(workdir / "lock"):
        _log.error("another worker holds %s since %g s; this one ends", workdir / "lock", _LOCK_WAIT_S)
        return exit_codes.BUG
    return attempt(workdir, is_fork=is_fork)


def attempt(workdir: Path, cache: ProcessCache | None = None, *, is_fork: bool = False) -> int:
    """Do the assignment in `workdir`; returns the exit code. `cache`: of a process that does more than one.

    `is_fork`: of a template, which holds memory beside this process.
    """
    try:
        return _run(workdir, cache, is_fork=is_fork)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise  # a bug: the traceback goes to stderr, the exit code is 1
        detail = str(error) or "an allocation failed"
        if is_out_of_accelerator_memory(error):
            live_files.mark_accelerator(workdir)
    guard.lift_limit()  # the memory is free again, and the report takes a little
    return _refuse(workdir, exit_codes.OVER_BUDGET, "over_budget", detail)


def stand_guard() -> None:
    """Before torch is loaded: end with the daemon, give freed memory back, be the first to go if memory runs out."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    parent = os.environ.get("FEDFIT_PARENT_PID", "")
    guard.die_with_parent(int(parent) if parent.isdigit() else None)
    guard.pin_malloc()
    guard.raise_oom_score()
    accelerator_environment.prepare()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal reaches all; the daemon decides
    signal.signal(
        signal.SIGTERM, lambda *_: os._exit(exit_codes.TERMINATED)
    )  # files become permanent by rename: nothing to tidy


def _lock(path: Path) -> bool:
    """One worker per lease; held until the process ends. A predecessor that was just killed is waited for."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                return False
            time.sleep(_LOCK_POLL_S)
        else:
            return True


def _run(workdir: Path, cache: ProcessCache | None, *, is_fork: bool) -> int:
    """Do the assignment and turn its errors into exit codes and `error.json`."""
    try:
        order = _read_order(workdir)
        faults.in_round(order.round)
        faults.point("worker.start")
        os.environ["OMP_NUM_THREADS"] = "1"  # read once, when torch is loaded: a process of one thread can be forked
        try:
            from edge_client.measuring import calibration
            from edge_client.worker import assignment
        except (ImportError, OSError) as error:
            failure = torch_failure(error)
            if failure is None:
                raise
            return _refuse(workdir, exit_codes.DECLINED, "no_torch", str(failure))

        faults.point("worker.loaded")
        try:
            assignment.carry_out(order, workdir, cache, template=os.getppid() if is_fork else None)
        except assignment.DeclinedError as error:
            # without a template there is more room
            code = exit_codes.NOT_AS_FORK if is_fork and error.code == "nothing_fits" else exit_codes.DECLINED
            return _refuse(workdir, code, error.code, str(error))
        except assignment.CalibrationNeededError as needed:
            if is_fork:
                return _refuse(workdir, exit_codes.NOT_AS_FORK, "calibration", str(needed))
            if cache is None:
                calibration.become(needed.job, workdir)
            calibration.measure_beside(needed.job, workdir)  # more is to come in this process
            return _run(workdir, cache, is_fork=False)
    except DiskFullError as error:
        return _refuse(workdir, exit_codes.DISK, "disk_full", str(error))
    except MachineError as error:
        return _refuse(workdir, exit_codes.DISK, "disk_error", str(error))
    except PayloadError as error:
        return _refuse(workdir, exit_codes.DECLINED, error.code, error.detail)
    return exit_codes.DONE


def _read_order(workdir: Path) -> WorkOrder:
    try:
        data = json.loads((workdir / "order.json").read_bytes())
    except OSError as error:
        raise MachineError(f"cannot read {workdir / 'order.json'}: {error.strerror}") from error
    except ValueError as error:
        raise PayloadError("malformed", f"order.json is not JSON: {error}") from error
    return from_map(WorkOrder, data, where="order")


def _refuse(workdir: Path, code: int, name: str, detail: str) -> int:
    _log.error("%s: %s", name, detail)
    text = json.dumps({"code": name, "detail": detail[:2000]})
    try:
        durable.write_bytes(workdir / "error.json", text.encode(), point="worker.error")
    except OSError as error:  # a full disk: the exit code has the reason, too
        _log.error("cannot write error.json: %s", error)
    return code


if __name__ == "__main__":
    guard.end(main())
