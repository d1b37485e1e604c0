"""The highest private memory of this process over many steps that are alike, without the file pages that they map.

The kernel keeps the highest RSS only, and a step that runs for the first time also maps pages of libraries: 1 to 3 MB
in a fresh process, 8 to 30 MB in a fork, which has mapped none. So the highest RSS is read and reset after every step,
and the file pages that are there at its end are taken off. From the second step on that is exact, because nothing new
is mapped; the first step is never the largest, because optimizers and libraries have taken their memory only after it.
Does not cover: processes whose work cannot be divided into steps (`private_memory.PeakMeter`, an upper bound).
"""

from __future__ import annotations

from edge_client.device import meter
from edge_client.device.private_memory import process_memory
from edge_client.errors import MachineError

__all__ = ["StepPeak"]


class StepPeak:
    """Counts from where it is made; `look` belongs after every step."""

    def __init__(self) -> None:
        """Raises `MachineError` where the system cannot measure a peak anew."""
        if not meter.reset_peak():
            raise MachineError("this system does not let a process reset its peak memory (/proc/self/clear_refs)")
        self.base_bytes = process_memory().private_bytes
        self._most_bytes = 0

    def look(self, *_: object) -> None:
        """After a step; takes what a progress report takes, which it may be called as."""
        memory = process_memory()
        highest = memory.peak_rss_bytes - memory.file_bytes + memory.swapped_bytes
        self._most_bytes = max(self._most_bytes, highest - self.base_bytes)
        meter.reset_peak()

    @property
    def num_bytes(self) -> int:
        """How far the process was above its base at most, until it was looked at last."""
        return self._most_bytes
