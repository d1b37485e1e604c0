"""The memory of an accelerator that a worker trains on: its budget, the limit that torch enforces, who else takes it.

    separate   a budget beside that of the host: the owner's, or a share of what is free there
    unified    the host's budget is one sum: what the process has there, what torch reserved, context and libraries

The context cannot be given back, and is counted: measured in this process, a bound where nobody can measure it. What
this worker has is written down for the daemon, which cannot see it: on a Jetson it is in no RSS and no control group.
Covers: one worker. Does not cover: what fits (`accelerator_plan`), the host's memory (`allowance`).
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from edge_client import faults
from edge_client.config.quantities import format_bytes
from edge_client.device.accelerator import Accelerator
from edge_client.errors import NothingFitsError
from edge_client.worker import live_files

__all__ = ["AcceleratorMemory"]

_log = logging.getLogger(__name__)

_USABLE_PERCENT = 90  # of what is free, where the owner names no budget: other programs grow meanwhile
_LOOK_EVERY_S = 0.25
_NOTEWORTHY = 0.9  # of the budget: less has changed by noise
_UNLIMITED = 2**52


class AcceleratorMemory:
    """Of one worker, from the moment when it has a context."""

    def __init__(self, device: Accelerator, workdir: Path, *, limit_bytes: int | None, workers: int = 1) -> None:
        """`limit_bytes` is `limits.accelerator-memory`, `workers` how many share the device."""
        self.device = device
        self.is_unified = device.memory == "unified"
        self._workdir = workdir
        self._limit_bytes, self._workers = limit_bytes, workers
        self._due, self._written = 0.0, -1
        self.context_bytes = device.context_bytes()
        self.base_bytes = 0
        self.budget_bytes = _UNLIMITED

    def warm(self) -> None:
        """The libraries are loaded, and the model lies there: from here on everything is training."""
        self.device.free()
        self.context_bytes = self.device.context_bytes()
        self.base_bytes = self.used_bytes()
        if not self.is_unified:
            self.budget_bytes = self._budget_now()
            self._check_context()
        self.look()

    def _check_context(self) -> None:
        """No plan helps if the context alone is too large."""
        if self.budget_bytes < self.base_bytes:
            has, takes = format_bytes(self.budget_bytes), format_bytes(self.base_bytes)
            users = "; ".join(str(user) for user in self.device.users() if user.pid != os.getpid())
            raise NothingFitsError(
                f"limits.accelerator-memory: a worker may use {has} of the accelerator, which is less than the {takes} "
                f"that {self.device.kind} takes with this model before it trains{'; ' + users if users else ''}"
            )

    def used_bytes(self) -> int:
        """By this process now: what torch reserved, context and libraries."""
        return self.device.reserved_bytes() + self.context_bytes

    def peak_bytes(self) -> int:
        """The most since `begin`."""
        return self.device.peak_reserved_bytes() + self.context_bytes

    def begin(self, budget_bytes: int) -> None:
        """A plan comes into force: torch refuses to reserve more than its budget, and the peak counts from here."""
        self.device.free()
        self.budget_bytes = budget_bytes
        room = max(0, budget_bytes - self.context_bytes)
        self.device.limit(int(room * faults.scale("accelerator.limit")))
        self.device.reset_peak()

    def look(self) -> int | None:
        """The new, smaller budget, if another program has taken memory; looks a few times a second.

        Memory that a unified device shares with the host is watched by the daemon, which learns here what is ours.
        """
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + _LOOK_EVERY_S
        if self.is_unified:
            self._write_use()
            return None
        left = self._budget_now()
        return left if left < _NOTEWORTHY * self.budget_bytes else None

    def _budget_now(self) -> int:
        """As it would be if this worker had nothing yet."""
        free, total = self.device.memory_bytes()
        available = free + self.used_bytes()
        if self._limit_bytes is not None:
            return min(self._limit_bytes, available)
        return min(available, total // self._workers) * _USABLE_PERCENT // 100

    def _write_use(self) -> None:
        used = self.used_bytes()
        if used != self._written:
            self._written = used
            try:
                live_files.write_use(self._workdir, used)
            except OSError as error:  # it will count as another program's
                _log.warning("cannot tell the daemon what the accelerator takes: %s", error)
