"""Progress of an assignment as JSON lines to the daemon, over the pipe that FEDFIT_PROGRESS_FD names."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass

__all__ = ["Progress"]

_INTERVAL_S = 0.5


@dataclass(slots=True)
class Progress:
    """The first and the last line of a phase are always written, others twice a second at most."""

    fd: int = -1  # none: nobody listens
    phase: str = ""
    due: float = 0.0

    def __post_init__(self) -> None:
        text = os.environ.get("FEDFIT_PROGRESS_FD", "")
        if text.isdigit():
            self.fd = int(text)
            os.set_blocking(self.fd, False)  # a slow reader loses lines; it does not hold up the training

    def report(self, phase: str, step: int, total: int, loss: float = 0.0) -> None:
        """Write a line if one is due; a loss that is not finite is left out."""
        now = time.monotonic()
        if self.fd < 0 or (phase == self.phase and step != total and now < self.due):
            return
        self.phase, self.due = phase, now + _INTERVAL_S
        shown = loss if math.isfinite(loss) else None
        line = json.dumps({"phase": phase, "step": step, "total": total, "loss": shown}) + "\n"
        try:
            os.write(self.fd, line.encode())
        except BlockingIOError:
            pass
        except OSError:  # the reader is gone
            self.fd = -1
