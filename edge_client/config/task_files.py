"""The files of tasks: where they are, their bytes, their hash. All that the daemon needs of tasks, and small for it.

Does not cover: what is in them (`task`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from edge_client.errors import InputError

__all__ = ["MAX_TASK_BYTES", "AllowedTasks", "read_task_file", "split_place", "task_sha256"]

_log = logging.getLogger(__name__)

MAX_TASK_BYTES = 2**20


def split_place(place: str, *, is_blob: bool = False) -> tuple[Path, str]:
    """`FILE.py:OBJECT` as path and name; the name is `task` if none is given. A blob may be called anything."""
    path, colon, name = place.rpartition(":")
    if not colon or "/" in name:
        path, name = place, "task"
    if not (path.endswith(".py") or is_blob) or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise InputError(f"expected a task as FILE.py:OBJECT, got {place!r}")
    return Path(path), name


def read_task_file(path: Path, *, shown: str = "", what: str = "task") -> bytes:
    """The bytes of a task's file; `shown` is how messages call it, if not by its path. Raises `InputError`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise InputError(f"cannot read the {what} {shown or path}: it is no file")
        with open(path, "rb") as file:
            data = file.read(MAX_TASK_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read the {what} {shown or path}: {error.strerror}") from error
    if len(data) > MAX_TASK_BYTES:
        raise InputError(f"{shown or path}: expected a {what} of at most {MAX_TASK_BYTES} bytes, got more")
    return data


def task_sha256(path: Path) -> str:
    """The hash of a task's file; raises `InputError` if it cannot be read."""
    return hashlib.sha256(read_task_file(path)).hexdigest()


class AllowedTasks:
    """The tasks that a device's owner allows, as the daemon tells them: read again each time, so that a file may be
    replaced while the daemon runs."""

    def __init__(self, tasks: Mapping[str, str]) -> None:
        self._tasks = dict(tasks)
        self._told: set[str] = set()
        self._hashed: dict[str, tuple[int, ...]] = {}

    def hashes(self) -> dict[str, str]:
        """Name -> hash of its file; one that cannot be read is left out, and told once."""
        self._hashed = self._stamps()  # first: a file that changes meanwhile has changed
        found: dict[str, str] = {}
        for name, place in self._tasks.items():
            try:
                found[name] = task_sha256(split_place(place)[0])
            except InputError as error:
                if name not in self._told:
                    _log.warning("task %r is left out: %s", name, error)
                self._told.add(name)
            else:
                self._told.discard(name)
        return found

    def changed(self) -> bool:
        """Whether a file was replaced, came or went since the hashes were read; reads none."""
        return self._stamps() != self._hashed

    def _stamps(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, place in self._tasks.items():
            with contextlib.suppress(OSError, ValueError, InputError):
                info = split_place(place)[0].stat()
                found[name] = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
        return found
