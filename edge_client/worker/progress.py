"""Progress of an assignment as JSON lines to the daemon, over the pipe that FEDFIT_PROGRESS_FD names.

It also counts how long each phase takes, for the report (`Report.phases`): durations only, because nobody relies on a
device's clock. The daemon has counted what came before the worker: `fetch` until the parts were here, `wait` until a
worker could begin; `start` is its process, until the worker's first line.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_client.records import WorkOrder

__all__ = ["Progress"]

_INTERVAL_S = 0.5


@dataclass(slots=True)
class Progress:
    """The first and the last line of a phase are always written, others twice a second at most."""

    fd: int = -1  # none: nobody listens
    phase: str = ""
    due: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # seconds of those that have ended
    since: float = field(default_factory=time.monotonic)  # when the phase began

    def __post_init__(self) -> None:
        text = os.environ.get("FEDFIT_PROGRESS_FD", "")
        if text.isdigit():
            self.fd = int(text)
            os.set_blocking(self.fd, False)  # a slow reader loses lines; it does not hold up the training

    @classmethod
    def of(cls, order: WorkOrder) -> Progress:
        """The progress of a worker that begins now; its process was asked for when the order says."""
        phases, now = dict(order.phases), time.monotonic()
        if order.starts_at is not None and order.starts_at <= now:  # otherwise the machine was started again since
            phases["start"] = now - order.starts_at
        return cls(phases=phases)

    def durations(self) -> Mapping[str, float]:
        """Seconds of each phase that has ended, in the order in which they began."""
        return {name: round(seconds, 3) for name, seconds in self.phases.items()}

    def report(self, phase: str, step: int, total: int, loss: float = 0.0) -> None:
        """Write a line if one is due; a loss that is not finite is left out."""
        now = time.monotonic()
        if phase != self.phase:
            self._begin(phase, now)
        if self.fd < 0 or (step != total and now < self.due):
            return
        self.due = now + _INTERVAL_S
        shown = loss if math.isfinite(loss) else None
        line = json.dumps({"phase": phase, "step": step, "total": total, "loss": shown}) + "\n"
        try:
            os.write(self.fd, line.encode())
        except BlockingIOError:
            pass
        except OSError:  # the reader is gone
            self.fd = -1

    def _begin(self, phase: str, now: float) -> None:
        if self.phase:
            self.phases[self.phase] = self.phases.get(self.phase, 0.0) + now - self.since
        self.phase, self.since, self.due = phase, now, now
