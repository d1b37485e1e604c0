"""`coordinator start` that notes the CPU time of every turn of its loop's thread: `timed_coordinator FILE start ...`.

When it ends, FILE holds a line for each turn: when it ended (monotonic clock) and its CPU in milliseconds.
"""

from __future__ import annotations

import sys
import time
from array import array
from typing import Any

from coordinator.cli.main import main as coordinator
from coordinator.server.service import Service

__all__ = ["main"]


def main() -> int:
    """Wrap the turn of the loop, then be the coordinator."""
    path, sys.argv = sys.argv[1], [sys.argv[0], *sys.argv[2:]]
    turn, ends, costs = Service._turn, array("d"), array("d")

    def timed(self: Service, control: Any) -> None:
        before = time.thread_time()
        turn(self, control)
        ends.append(time.monotonic())
        costs.append(1000 * (time.thread_time() - before))

    Service._turn = timed  # type: ignore[method-assign]
    try:
        return coordinator() or 0
    finally:
        with open(path, "w", encoding="ascii") as file:
            file.writelines(f"{end:.3f} {cost:.4f}\n" for end, cost in zip(ends, costs, strict=True))


if __name__ == "__main__":
    sys.exit(main())
