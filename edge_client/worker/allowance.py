"""The memory that a running worker may use: limited by the kernel, checked against the measured peak.

What counts is private memory (`device.private_memory`), of a worker that was forked together with what its template
holds. RLIMIT_DATA refuses an allocation that is far too large before it happens. It counts virtual memory and needs
some slack, so the measured peak is checked as well. The daemon may lower the budget at any time.
Does not cover: what fits (`planning`), when the daemon lowers it (`client.daemon`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from edge_client.config.quantities import format_bytes
from edge_client.device import guard, meter
from edge_client.device.private_memory import process_memory, worker_bytes
from edge_client.device.step_peak import StepPeak
from edge_client.errors import MachineError
from edge_client.worker.live_files import BudgetFile

__all__ = ["LIMIT_SLACK_BYTES", "Allowance", "Measured"]

LIMIT_SLACK_BYTES = 16 * 2**20  # RLIMIT_DATA counts virtual memory: arenas and guard pages that are never resident

_LOOK_EVERY_S = 0.25  # a batch may take a millisecond
_WRITTEN_BYTES = 700_000  # measured: 0.6 MB after the worker was warm
_FIRST_LOOKS = 16  # that come at every batch: libraries still read their code, which a peak must not be mistaken for


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a worker used, for its report."""

    base_bytes: int  # private memory of the warm process
    peak_bytes: int  # of private memory
    peak_rss_bytes: int
    file_bytes: int  # pages of files that it has in RAM at the end, beside its private memory


class Allowance:
    """The budget of this process, which only ever shrinks while it trains."""

    def __init__(self, budget_bytes: int, workdir: Path, *, template: int | None = None) -> None:
        """`template` is the process that this one was forked from; None for a process that was not."""
        self.budget_bytes = budget_bytes
        self._budget_file = BudgetFile(workdir)
        self._template = template
        self._due = 0.0
        self._num_looks = 0
        self._peak: StepPeak | None = None  # since the plan in force began; None where the system cannot measure it
        self._can_measure = True
        self._peak_before = self._rss_before = 0  # before the plan in force, with which it is compared

    def used_bytes(self) -> int:
        """The private memory that this process answers for now."""
        return worker_bytes(template=self._template)

    def limit(self, slack_bytes: int) -> None:
        """From now on an allocation beyond the budget and the slack fails."""
        guard.limit_growth(max(0, self.budget_bytes - self.used_bytes()) + slack_bytes)

    def begin(self) -> None:
        """The process is warm: what is measured from now on, the plan answers for."""
        memory = process_memory()
        beside = self.used_bytes() - memory.private_bytes
        self._rss_before = memory.peak_rss_bytes
        self._peak_before = memory.peak_rss_bytes - memory.file_bytes + beside
        self._restart_peak()

    def look(self) -> int | None:
        """The new, smaller budget, if the daemon has set one; raises `MemoryError` over the old one.

        Called before every batch; it looks a few times a second.
        """
        now = time.monotonic()
        self._num_looks += 1
        if now < self._due and self._num_looks > _FIRST_LOOKS:
            return None
        self._due = now + _LOOK_EVERY_S
        self.check()
        budget_bytes = self._budget_file.new_budget()
        return budget_bytes if budget_bytes is not None and budget_bytes < self.budget_bytes else None

    def check(self) -> None:
        """Raise `MemoryError` if this process was over its budget since the plan in force began."""
        peak_bytes = self._measured_peak()
        if self._can_measure and peak_bytes > self.budget_bytes:
            raise MemoryError(f"the worker used {format_bytes(peak_bytes)} of {format_bytes(self.budget_bytes)}")

    def shrink(self, budget_bytes: int, slack_bytes: int) -> None:
        """Lower the budget; what was used before no longer counts."""
        self.budget_bytes = budget_bytes
        self._peak_before = self._rss_before = 0
        self._restart_peak()
        self.limit(slack_bytes)

    def base_bytes(self) -> int:
        """The private memory when the plan in force began."""
        return self._peak.base_bytes if self._peak is not None else 0

    def growth_bytes(self) -> int:
        """How far the process has grown above that by itself; 0 where the system cannot measure it."""
        if self._peak is None:
            return 0
        self._peak.look()
        return self._peak.new_bytes

    @property
    def written_bytes(self) -> int:
        """What a process that was forked takes beside its growth: pages of its template that it comes to write to."""
        return _WRITTEN_BYTES if self._template is not None else 0

    def peak_bytes(self) -> int:
        """The largest private memory since the process was warm; after `shrink`: since then."""
        return max(self._peak_before, self._measured_peak(), self.used_bytes() if self._peak is not None else 0)

    def peak_rss_bytes(self) -> int:
        """The largest RSS of this process; after `shrink`: since then."""
        self._measured_peak()
        seen = self._peak.peak_rss_bytes if self._peak is not None else 0
        return max(self._rss_before, seen, meter.peak_rss_bytes())

    def measured(self, base_bytes: int) -> Measured:
        """For the report; `base_bytes` is the private memory of the warm process."""
        return Measured(
            base_bytes=base_bytes,
            peak_bytes=self.peak_bytes(),
            peak_rss_bytes=self.peak_rss_bytes(),
            file_bytes=process_memory().file_bytes,
        )

    def _measured_peak(self) -> int:
        if self._peak is None:  # nothing resets the peak, and RSS stands for private memory
            return meter.peak_rss_bytes()
        self._peak.look()
        return self._peak.base_bytes + self._peak.num_bytes

    def _restart_peak(self) -> None:
        """Measure the peak from here on; do not where the system cannot and the peak is over the budget already."""
        try:
            self._peak = StepPeak(self._template)
        except MachineError:
            self._peak = None
            self._can_measure = meter.peak_rss_bytes() <= self.budget_bytes
