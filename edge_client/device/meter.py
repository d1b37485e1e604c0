"""Reads how much memory a process uses, as the kernel counts it.

Covers: RSS, its peak and private writable memory of this process. Linux has them in `/proc`; elsewhere (macOS, for
development) only the peak is known and stands for the others. See also `private_memory`, which budgets count.
"""

from __future__ import annotations

import resource
import sys

__all__ = [
    "data_bytes",
    "peak_rss_bytes",
    "peak_virtual_bytes",
    "reset_peak",
    "rss_bytes",
    "virtual_bytes",
]


def rss_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Largest RSS since the process began."""
    return _status_bytes("VmHWM")


def virtual_bytes() -> int:
    """Memory that this process has reserved, used or not."""
    return _status_bytes("VmSize")


def peak_virtual_bytes() -> int:
    """The largest `virtual_bytes` since the process began; nothing resets it."""
    return _status_bytes("VmPeak")


def reset_peak() -> bool:
    """Reset the peak to what is used now; returns False where the system cannot."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


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
