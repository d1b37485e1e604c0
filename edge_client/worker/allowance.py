"""The budget of a running worker: limited by the kernel, checked against the measured peak, smaller when told so.

RLIMIT_DATA refuses what would be far too much before it happens; it counts virtual memory and needs some slack, so the
measured peak is looked at as well. Does not cover: what fits (`planning`), who says that there is less (`daemon`).
"""

from __future__ import annotations

import time
from pathlib import Path

from edge_client.config.quantities import format_bytes
from edge_client.device import guard, meter
from edge_client.worker.live_files import BudgetNote

__all__ = ["LIMIT_SLACK_BYTES", "Allowance"]

LIMIT_SLACK_BYTES = 16 * 2**20  # RLIMIT_DATA counts virtual memory: arenas and guard pages that are never resident

_LOOK_EVERY_S = 0.25  # a batch may take a millisecond


class Allowance:
    """What this process may use, from start to end."""

    def __init__(self, budget_bytes: int, workdir: Path) -> None:
        self.budget_bytes = budget_bytes
        self._note = BudgetNote(workdir)
        self._due = 0.0
        self._peak_before = 0  # before the plan in force, with which it is compared
        self._measures = True

    def limit(self, slack_bytes: int) -> None:
        """From now on an allocation beyond the budget and the slack fails."""
        guard.limit_growth(max(0, self.budget_bytes - meter.rss_bytes()) + slack_bytes)

    def begin(self) -> None:
        """The process is warm: what is measured from now on is due to the plan."""
        self._peak_before = meter.peak_rss_bytes()
        self._restart_peak()

    def look(self) -> int | None:
        """The new, smaller budget, if the daemon has told one; raises `MemoryError` over the old one.

        Asked before every batch, it looks a few times a second.
        """
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + _LOOK_EVERY_S
        self.check()
        told = self._note.news()
        return told if told is not None and told < self.budget_bytes else None

    def check(self) -> None:
        """Raise `MemoryError` if this process was over its budget since the plan in force began."""
        peak = meter.peak_rss_bytes()
        if self._measures and peak > self.budget_bytes:
            raise MemoryError(f"the worker used {format_bytes(peak)} of {format_bytes(self.budget_bytes)}")

    def shrink(self, budget_bytes: int, slack_bytes: int) -> None:
        """Less is allowed from now on; what was used before is of the past."""
        self.budget_bytes = budget_bytes
        self._peak_before = 0
        self._restart_peak()
        self.limit(slack_bytes)

    def peak_bytes(self) -> int:
        """The largest RSS of this process; after `shrink`: since then."""
        return max(self._peak_before, meter.peak_rss_bytes())

    def _restart_peak(self) -> None:
        """Where the system cannot, a peak that is over the budget already says nothing about what follows."""
        self._measures = meter.reset_peak() or meter.peak_rss_bytes() <= self.budget_bytes
