"""The memory that a running worker may use: limited by the kernel, checked against the measured peak.

RLIMIT_DATA refuses an allocation that is far too large before it happens. It counts virtual memory and needs some
slack, so the measured peak is checked as well. The daemon may lower the budget at any time.
Does not cover: what fits (`planning`), when the daemon lowers it (`client.daemon`).
"""

from __future__ import annotations

import time
from pathlib import Path

from edge_client.config.quantities import format_bytes
from edge_client.device import guard, meter
from edge_client.worker.live_files import BudgetFile

__all__ = ["LIMIT_SLACK_BYTES", "Allowance"]

LIMIT_SLACK_BYTES = 16 * 2**20  # RLIMIT_DATA counts virtual memory: arenas and guard pages that are never resident

_LOOK_EVERY_S = 0.25  # a batch may take a millisecond


class Allowance:
    """The budget of this process, which only ever shrinks while it trains."""

    def __init__(self, budget_bytes: int, workdir: Path) -> None:
        self.budget_bytes = budget_bytes
        self._budget_file = BudgetFile(workdir)
        self._due = 0.0
        self._peak_before = 0  # before the plan in force, with which it is compared
        self._can_measure = True

    def limit(self, slack_bytes: int) -> None:
        """From now on an allocation beyond the budget and the slack fails."""
        guard.limit_growth(max(0, self.budget_bytes - meter.rss_bytes()) + slack_bytes)

    def begin(self) -> None:
        """The process is warm: what is measured from now on, the plan answers for."""
        self._peak_before = meter.peak_rss_bytes()
        self._restart_peak()

    def look(self) -> int | None:
        """The new, smaller budget, if the daemon has set one; raises `MemoryError` over the old one.

        Called before every batch; it looks a few times a second.
        """
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + _LOOK_EVERY_S
        self.check()
        budget_bytes = self._budget_file.new_budget()
        return budget_bytes if budget_bytes is not None and budget_bytes < self.budget_bytes else None

    def check(self) -> None:
        """Raise `MemoryError` if this process was over its budget since the plan in force began."""
        peak = meter.peak_rss_bytes()
        if self._can_measure and peak > self.budget_bytes:
            raise MemoryError(f"the worker used {format_bytes(peak)} of {format_bytes(self.budget_bytes)}")

    def shrink(self, budget_bytes: int, slack_bytes: int) -> None:
        """Lower the budget; what was used before no longer counts."""
        self.budget_bytes = budget_bytes
        self._peak_before = 0
        self._restart_peak()
        self.limit(slack_bytes)

    def peak_bytes(self) -> int:
        """The largest RSS of this process; after `shrink`: since then."""
        return max(self._peak_before, meter.peak_rss_bytes())

    def _restart_peak(self) -> None:
        """Measure the peak from here on; do not where the system cannot and the peak is over the budget already."""
        self._can_measure = meter.reset_peak() or meter.peak_rss_bytes() <= self.budget_bytes
