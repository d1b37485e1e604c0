"""Distinguishes a worker that hangs from a slow one: it reports nothing and uses no CPU time for a long time.

A disk that does not answer, or a task's code that waits for ever: training, measuring and reading all use CPU time.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["STALLED_AFTER_S", "StallWatch", "Watched"]

STALLED_AFTER_S = 600
_IDLE_CPU_S = 1.0  # between two looks; a process that only waits uses less
_LOOK_EVERY_S = 10.0


class Watched(Protocol):
    """The part of `workers.Worker` that is watched."""

    num_lines: int

    @property
    def pid(self) -> int:
        """Process id."""

    def cpu_seconds(self) -> float | None:
        """CPU time that it has used; None where the system does not tell."""


class StallWatch:
    """Watches one worker at a time."""

    def __init__(self) -> None:
        self._pid = 0
        self._num_lines, self._cpu_s = 0, 0.0  # at the last look that saw it move
        self._since = self._look_at = 0.0

    def has_stalled(self, worker: Watched, now: float) -> bool:
        """Whether it has done nothing for `STALLED_AFTER_S`; ask at any time, it is True once for each such time."""
        if worker.pid == self._pid and now < self._look_at:
            return False
        self._look_at = now + _LOOK_EVERY_S
        cpu_s = worker.cpu_seconds()
        moved = cpu_s is None or worker.num_lines != self._num_lines or cpu_s - self._cpu_s >= _IDLE_CPU_S
        is_same = worker.pid == self._pid
        if is_same and not moved and now - self._since < STALLED_AFTER_S:
            return False
        self._pid, self._num_lines, self._cpu_s, self._since = worker.pid, worker.num_lines, cpu_s or 0.0, now
        return is_same and not moved
