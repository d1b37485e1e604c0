"""A separate control group for the worker, whose limit the kernel enforces, where systemd delegates our group to us.

    OUR GROUP           version 2, with the memory controller; systemd: Delegate=yes
    ├── fedfit-client   this process moves there: a group whose children have controllers must hold no process itself
    └── fedfit-worker   memory.max and no swap

The worker's own limit (`guard`) is tighter, strikes first and lets it end cleanly; here the kernel kills it. Anything
that is refused is logged, and the worker runs without the group. Does not cover: reading limits (`cgroups`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from edge_client.device import cgroups
from edge_client.device.tree import Tree

__all__ = ["WorkerGroup"]

_log = logging.getLogger(__name__)

_CLIENT, _WORKER = "fedfit-client", "fedfit-worker"
_SLACK_BYTES = 32 * 2**20  # the kernel counts page tables and file pages here, too


class WorkerGroup:
    """The control group of the workers; `open` creates it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @classmethod
    def open(cls, root: Path = Path("/")) -> WorkerGroup | None:
        """Create the group and move this process into a group beside it; None where that is not delegated to us."""
        tree = Tree(root)
        group = cgroups.group_of_this_process(tree)
        if group is None:
            return None
        base = os.path.dirname(group) if os.path.basename(group) == _CLIENT else group
        if "memory" not in (tree.text(f"{base}/cgroup.controllers") or "").split():
            return None
        base = tree.place(base)
        if not _is_delegated(base):
            return None
        try:
            _divide(base)
        except OSError as error:
            _log.info("no control group for workers in %s: %s", base, error.strerror)
            return None
        return cls(f"{base}/{_WORKER}")

    def take(self, pid: int, budget_bytes: int) -> None:
        """Move a process into the group and set the group's limit."""
        try:
            _write(f"{self._folder}/memory.max", str(budget_bytes + _SLACK_BYTES))
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                _write(f"{self._folder}/memory.swap.max", "0")
            _write(f"{self._folder}/cgroup.procs", str(pid))
        except OSError as error:
            _log.warning("the worker is not in %s: %s", self._folder, error.strerror)

    def remove(self) -> None:
        """Remove the group once its last worker has ended."""
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)


def _is_delegated(base: str) -> bool:
    """Whether it is ours to divide: root may write everywhere, so systemd marks what it gives away."""
    if not (os.access(base, os.W_OK) and os.access(f"{base}/cgroup.procs", os.W_OK)):
        return False
    return os.geteuid() != 0 or any(_mark(base, name) == b"1" for name in ("user.delegate", "trusted.delegate"))


def _mark(path: str, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return os.getxattr(path, name)
    return b""


def _divide(base: str) -> None:
    """Make both groups; if another process is in the way (EBUSY), everything stays as it was."""
    client, worker = f"{base}/{_CLIENT}", f"{base}/{_WORKER}"
    os.makedirs(client, exist_ok=True)
    try:
        _write(f"{client}/cgroup.procs", str(os.getpid()))
        _write(f"{base}/cgroup.subtree_control", "+memory")
        os.makedirs(worker, exist_ok=True)
    except OSError:
        with contextlib.suppress(OSError):
            _write(f"{base}/cgroup.procs", str(os.getpid()))
            os.rmdir(client)
        raise


def _write(path: str, text: str) -> None:
    """Files of a group exist as long as the group does: never made here."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
