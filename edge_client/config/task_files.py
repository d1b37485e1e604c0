"""Locates, reads and hashes the Python files of tasks. The daemon needs no more of a task, so this loads no torch.

Does not cover: what such a file defines (`edge_client.task`).
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
    """Split `FILE.py:OBJECT` into path and object; the object defaults to `task`. A blob may have any file name."""
    path, colon, name = place.rpartition(":")
    if not colon or "/" in name:
        path, name = place, "task"
    if not (path.endswith(".py") or is_blob) or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise InputError(f"expected a task as FILE.py:OBJECT, got {place!r}")
    return Path(path), name


def read_task_file(path: Path, *, shown: str = "", what: str = "task") -> bytes:
    """Read a task's file; errors call it `shown`, or by its path. Raises `InputError`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would block
            raise InputError(f"cannot read the {what} {shown or path}: it is no file")
        with open(path, "rb") as file:
            data = file.read(MAX_TASK_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read the {what} {shown or path}: {error.strerror}") from error
    if len(data) > MAX_TASK_BYTES:
        raise InputError(f"{shown or path}: expected a {what} of at most {MAX_TASK_BYTES} bytes, got more")
    return data


def task_sha256(path: Path) -> str:
    """Hash a task's file; raises `InputError` if it cannot be read."""
    return hashlib.sha256(read_task_file(path)).hexdigest()


class AllowedTasks:
    """The tasks that a device's owner allows; their files may be replaced while the daemon runs."""

    def __init__(self, tasks: Mapping[str, str]) -> None:
        self._tasks = dict(tasks)
        self._unreadable: set[str] = set()  # already warned about
        self._hashed_stamps: dict[str, tuple[int, ...]] = {}

    def hashes(self) -> dict[str, str]:
        """The hash of each task's file by the task's name; an unreadable file is left out, with one warning."""
        self._hashed_stamps = self._stamps()  # before reading, so that a change during the read is noticed later
        hashes: dict[str, str] = {}
        for name, place in self._tasks.items():
            try:
                hashes[name] = task_sha256(split_place(place)[0])
            except InputError as error:
                if name not in self._unreadable:
                    _log.warning("task %r is left out: %s", name, error)
                self._unreadable.add(name)
            else:
                self._unreadable.discard(name)
        return hashes

    def changed(self) -> bool:
        """Whether a file was replaced, appeared or disappeared since `hashes`; does not read the files."""
        return self._stamps() != self._hashed_stamps

    def _stamps(self) -> dict[str, tuple[int, ...]]:
        stamps: dict[str, tuple[int, ...]] = {}
        for name, place in self._tasks.items():
            with contextlib.suppress(OSError, ValueError, InputError):
                info = split_place(place)[0].stat()
                stamps[name] = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
        return stamps
