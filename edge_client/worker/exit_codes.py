"""How a worker process tells by its exit code how it ended; its daemon and the pool of a simulation read it."""

from __future__ import annotations

__all__ = ["BUG", "DECLINED", "DISK", "DONE", "NOT_AS_FORK", "OVER_BUDGET", "TERMINATED"]

DONE = 0
BUG = 1  # an uncaught exception, or another worker on the same lease
DISK = 74  # full or broken
OVER_BUDGET = 75  # a smaller plan may fit
DECLINED = 76  # another try would end the same; `error.json` has the code for the coordinator
NOT_AS_FORK = 77  # of a template: the assignment needs the memory that the template holds; `error.json` says what for
TERMINATED = 143  # SIGTERM, as a shell reports it
