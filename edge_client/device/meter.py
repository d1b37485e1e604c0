"""How much memory this process uses, as the kernel counts it.

Covers: RSS, its peak, private writable memory. Linux reads `/proc/self`; elsewhere (macOS, for
development) only the peak is known and stands for the others.
"""

from __future__ import annotations

import resource
import sys

__all__ = ["data_bytes", "peak_rss_bytes", "rss_bytes"]


def rss_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Largest RSS since the process began."""
    return _status_bytes("VmHWM")


def data_bytes() -> int:
    """Private writable memory, resident or not: what RLIMIT_DATA counts."""
    return _status_bytes("VmData")


def _status_bytes(field: str) -> int:
    if sys.platform != "linux":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the BSDs kilobytes
    prefix = f"{field}:"
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith(prefix):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no line {field}; is /proc mounted?")
