"""How a worker ended, read from its exit code and from the files that it left in its folder.

See also `edge_client.worker.exit_codes`. An exit code that is not listed there is a crash, unless the kernel killed the
worker for want of memory.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edge_client.client.events import Event, Finished, WorkerDone, WorkerFailed
from edge_client.errors import PayloadError
from edge_client.records import from_map
from edge_client.worker import exit_codes, live_files

__all__ = ["finished_update", "last_lines", "outcome", "saved_failure"]

R = TypeVar("R")

_LOG_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Error:
    """`error.json`: why a worker ended without an update, as it reports itself."""

    code: str = ""
    detail: str | None = None

    def declined_code(self) -> str:
        """The code of a declined assignment in the form that messages allow, whatever the worker wrote."""
        return self.code if re.fullmatch(r"[a-z0-9_]{1,32}", self.code) else "declined"


def outcome(lease: str, folder: Path, code: int, *, killed_for_memory: bool = False) -> Event:
    """The event of a worker that ended with this exit code; `killed_for_memory`: the kernel ended it."""
    update = finished_update(folder) if code == exit_codes.DONE else None
    if update is not None:
        return WorkerDone(lease, update)
    error = _read(folder / "error.json", _Error) or _Error()
    trial = live_files.read_trial(folder)
    exceeded = trial.exceeded() if trial is not None else None
    if exceeded is not None and killed_for_memory:
        code, error = exit_codes.OVER_BUDGET, _Error(detail="the system was out of memory and killed the worker")
    kind = {exit_codes.OVER_BUDGET: "over_budget", exit_codes.DISK: "disk_full"}.get(code, "crashed")
    over = code == exit_codes.OVER_BUDGET
    return WorkerFailed(
        lease=lease,
        code=error.declined_code() if code in (exit_codes.DECLINED, exit_codes.NOT_AS_FORK) else kind,
        detail=_sendable(f"the worker ended with exit code {code}" if error.detail is None else error.detail, 2000),
        log=last_lines(folder / "log.txt"),
        final=code == exit_codes.DECLINED or (over and exceeded is None),
        exceeded=exceeded if over else None,
    )


def finished_update(folder: Path) -> Finished | None:
    """The update that a worker left in its folder, if it is complete."""
    update = _read(folder / "update.json", Finished)
    binary = folder / "update.bin"
    is_whole = update is not None and binary.exists() and binary.stat().st_size == update.length
    return update if is_whole else None


def saved_failure(lease: str, folder: Path) -> WorkerFailed | None:
    """The failure of a worker that exceeded its budget just before the daemon died; other ends are tried again."""
    error, trial = _read(folder / "error.json", _Error), live_files.read_trial(folder)
    exceeded = trial.exceeded() if trial is not None else None
    if error is None or error.code != "over_budget" or exceeded is None:
        return None
    detail = _sendable(error.detail or "", 2000)
    return WorkerFailed(lease=lease, code="over_budget", detail=detail, exceeded=exceeded)


def last_lines(path: Path) -> tuple[str, ...]:
    """The end of a worker's log, short enough to travel."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(_sendable(line, 300) for line in text.splitlines()[-_LOG_LINES:])


def _read(path: Path, cls: type[R]) -> R | None:
    """Read a file of the worker as a record; None if it is missing or invalid."""
    try:
        return from_map(cls, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, PayloadError):
        return None


def _sendable(text: str, limit_bytes: int) -> str:
    """Shorten a text to what a message may hold, and replace what is not valid UTF-8, as in file names."""
    return text.encode("utf-8", "replace")[:limit_bytes].decode("utf-8", "ignore")
