"""How a worker process tells by its exit code how it ended; its daemon and the pool of a simulation read it."""

from __future__ import annotations

__all__ = ["BUG", "DECLINED", "DISK", "DONE", "OVER_BUDGET", "TERMINATED"]

DONE = 0
BUG = 1  # an uncaught exception, or another worker on the same lease
DISK = 74  # full or broken
OVER_BUDGET = 75  # a smaller plan may fit
DECLINED = 76  # another try would end the same; `error.json` has the code for the coordinator
TERMINATED = 143  # SIGTERM, as a shell reports it
