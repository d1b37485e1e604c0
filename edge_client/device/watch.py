"""Watches how much memory a worker may still use, and whether the kernel killed a process for lack of memory.

    auto            the usual budget (`profile`) as it would be now, were the worker's own memory free
    limits.memory   the owner's limit; less only when the system is in danger: more than half of its reserve is gone

What counts is private memory: file pages go when memory is short. Each call reads `/proc/meminfo` and the files of the
control groups, a dozen in all. Does not cover: notifying the worker.
"""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

from edge_client.device.cgroups import MemoryLimit, read_cgroups
from edge_client.device.private_memory import ProcessMemory, process_memory
from edge_client.device.probe import Memory, read_memory
from edge_client.device.profile import derive_budget, reserve_bytes
from edge_client.device.tree import Tree

__all__ = ["MemoryWatch", "count_oom_kills", "killed_for_memory"]


class MemoryWatch:
    """The memory of one system, read anew at each call."""

    def __init__(self, budget_bytes: int, *, limit: int | None, root: Path = Path("/")) -> None:
        """`budget_bytes` is what a worker gets at most; `limit` is `limits.memory` of device.toml."""
        self._most = budget_bytes
        self._limit = limit
        self._root = root

    def budget_bytes(self, worker: int | None = None, *, accelerator_bytes: int = 0) -> int:
        """How much a worker process may use now; `worker` is the process id of a running one.

        `accelerator_bytes`: what it has of the system's memory through an accelerator, which no process's figures show.
        """
        tree = Tree(self._root)
        memory = read_memory(tree)
        used = process_memory(worker) if worker is not None else ProcessMemory()
        if memory is None:  # hidden, or just being written
            return self._most
        if self._limit is not None:
            return min(self._most, _out_of_danger(memory, used, accelerator_bytes, self._most))
        limits = [_without(limit, used) for limit in read_cgroups(tree).memory]
        # its file pages are cache, which the kernel counts as available already
        available = min(memory.total_bytes, memory.available_bytes + used.anonymous_bytes + accelerator_bytes)
        return min(self._most, derive_budget(replace(memory, available_bytes=available), limits, None).num_bytes)


def _out_of_danger(memory: Memory, used: ProcessMemory, accelerator_bytes: int, most: int) -> int:
    """What the worker may keep so that the system has its reserve again, if more than half of that is gone."""
    reserve = reserve_bytes(memory)
    if memory.available_bytes >= reserve // 2:
        return most
    return max(0, used.private_bytes + accelerator_bytes + memory.available_bytes - reserve)


def _without(limit: MemoryLimit, used: ProcessMemory) -> MemoryLimit:
    return replace(limit, used_bytes=max(0, limit.used_bytes - used.anonymous_bytes))


def count_oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel killed for want of memory since it started; None if it does not say (before 4.13)."""
    match = re.search(r"^oom_kill (\d{1,18})$", Tree(root).text("/proc/vmstat") or "", re.MULTILINE)
    return int(match[1]) if match else None


def killed_for_memory(code: int, before: int | None, root: Path = Path("/")) -> bool:
    """Whether somebody else's SIGKILL was the kernel's: it counts them; where it does not, nobody else does it.

    `code` is the exit code of the process, `before` the result of `count_oom_kills` when it started.
    """
    if code != -signal.SIGKILL:
        return False
    now = count_oom_kills(root)
    return before is None or now is None or now > before
