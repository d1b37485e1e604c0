"""What this device is and how much memory a worker may use: a `DeviceProfile` from `/proc`, without torch.

Does not cover: accelerators, boards by name, cgroup limits.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from edge_client.errors import MachineError
from edge_client.records import DeviceProfile

__all__ = ["measure"]

_RESERVE_BYTES = 128 * 10**6  # what the rest of a small board needs to stay reachable
_RESERVE_SHARE = 0.1
_USABLE_SHARE = 0.8  # other processes grow while a worker trains


def measure(limit: int | None, *, meminfo: Path = Path("/proc/meminfo")) -> DeviceProfile:
    """Profile of this machine; the budget is `limit` if given, else a careful share of what is free now."""
    total, available = _memory(meminfo)
    if limit is None:
        reserve = max(_RESERVE_BYTES, int(_RESERVE_SHARE * total))
        limit = max(0, int(_USABLE_SHARE * (available - reserve)))
    return DeviceProfile(
        budget_bytes=limit,
        memory_bytes=total,
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        machine=platform.machine()[:64],
    )


def _memory(meminfo: Path) -> tuple[int, int]:
    """(total, available) in bytes."""
    if sys.platform != "linux":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2  # macOS does not say what is available; it serves for development only
    found: dict[str, int] = {}
    try:
        with open(meminfo, encoding="ascii", errors="replace") as lines:
            for line in lines:
                name, _, rest = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(rest.split()[0]) * 1024
        return found["MemTotal"], found["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise MachineError(
            f"cannot read MemTotal and MemAvailable from {meminfo} ({error}); set limits.memory in device.toml"
        ) from error
