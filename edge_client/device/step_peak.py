"""The highest private memory of this process over many steps that are alike, without the file pages that they map.

The kernel keeps the highest RSS only, and a step that runs for the first time also maps pages of libraries: 1 to 3 MB
in a fresh process, 8 to 30 MB in a fork, which has mapped none. So the highest RSS is read and reset after every step,
and the file pages that are there at its end are taken off. From the second step on that is exact, because nothing new
is mapped; the first step is never the largest, because optimizers and libraries have taken their memory only after it.
Does not cover: processes whose work cannot be divided into steps (`private_memory.PeakMeter`, an upper bound).
"""

from __future__ import annotations

import time

from edge_client.device import meter
from edge_client.device.private_memory import process_memory, worker_bytes
from edge_client.errors import MachineError

__all__ = ["StepPeak"]

_COMPARE_EVERY_S = 2.0  # with the template: the kernel walks all pages, which takes milliseconds


class StepPeak:
    """Counts from where it is made; `look` belongs after every step."""

    def __init__(self, template: int | None = None) -> None:
        """`template` is the process that this one was forked from, and answers for; None for one that was not.

        Raises `MachineError` where the system cannot measure a peak anew.
        """
        if not meter.reset_peak():
            raise MachineError("this system does not let a process reset its peak memory (/proc/self/clear_refs)")
        self._template = template
        self._beside_bytes = self._compared_at = 0.0
        self._compare()
        self._began_beside_bytes = self._beside_bytes
        self._began_bytes = process_memory().private_bytes
        self.base_bytes = self._began_bytes + int(self._beside_bytes)
        self.peak_rss_bytes = 0
        self._most_bytes = 0

    def look(self, *_: object) -> None:
        """After a step; takes what a progress report takes, which it may be called as."""
        memory = process_memory()
        if self._template is not None and time.monotonic() - self._compared_at > _COMPARE_EVERY_S:
            self._compare()
        highest = memory.peak_rss_bytes - memory.file_bytes + memory.swapped_bytes
        self._most_bytes = max(self._most_bytes, highest - self._began_bytes)
        self.peak_rss_bytes = max(self.peak_rss_bytes, memory.peak_rss_bytes)
        meter.reset_peak()

    def _compare(self) -> None:
        """What the template holds and this process does not share; it grows with each page that this writes to."""
        if self._template is not None:
            answered = worker_bytes(template=self._template)
            self._beside_bytes = max(self._beside_bytes, answered - process_memory().private_bytes)
        self._compared_at = time.monotonic()

    @property
    def num_bytes(self) -> int:
        """How far the process was above its base at most, until it was looked at last."""
        return self._most_bytes + int(self._beside_bytes - self._began_beside_bytes)

    @property
    def new_bytes(self) -> int:
        """The same without the pages of its template that it has written to since."""
        return self._most_bytes
