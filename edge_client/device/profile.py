"""Derives from a device's facts how much memory a worker may use, and gives the reasons.

    budget = min(80 % of (MemAvailable - reserve), room in every control group); reserve = max(128 MB, 10 % of MemTotal)

`limits.memory` of device.toml stands above all of it. Swap and zram are never counted, and where a GPU shares the
system's memory, that memory is counted once. Does not cover: reading the system (`probe`). No torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client.config.quantities import format_bytes
from edge_client.device.cgroups import CpuQuota, MemoryLimit
from edge_client.device.probe import Memory, probe
from edge_client.errors import MachineError
from edge_client.records import DeviceProfile

__all__ = ["Budget", "derive_budget", "measure", "no_memory", "reserve_bytes", "usable_cores"]

_log = logging.getLogger(__name__)

_RESERVE_BYTES = 128 * 10**6  # what the rest of a small board needs to stay reachable
_RESERVE_SHARE = 10  # one part in ten
_USABLE_PERCENT = 80  # other processes grow while a worker trains


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that a worker process may use, and for people each step of its calculation."""

    num_bytes: int
    reasons: tuple[str, ...]


def measure(limit: int | None, *, root: Path = Path("/")) -> DeviceProfile:
    """Measure the profile of this machine for the coordinator; `limit`, if it is set, is the budget."""
    system = probe(root)
    for note in system.notes:
        _log.warning("%s", note)
    if limit is None and system.memory is None:
        raise no_memory(root, system.notes)
    budget_bytes = derive_budget(system.memory, system.groups.memory, limit).num_bytes
    return DeviceProfile(
        budget_bytes=budget_bytes,  # a worker whose RSS stays below it is inside of it, too
        private_budget_bytes=budget_bytes,
        memory_bytes=system.memory.total_bytes if system.memory else 0,
        cores=usable_cores(system.cores, system.groups.cpu),
        kind=system.kind,
        machine=(system.model or system.machine)[:64],
    )


def no_memory(root: Path, notes: Sequence[str]) -> MachineError:
    """The error for a system that hides how much memory it has."""
    path = root / "proc/meminfo"
    why = "".join(f" ({note})" for note in notes if "/proc/meminfo" in note)
    return MachineError(f"expected MemTotal and MemAvailable in {path}{why}; set limits.memory in device.toml")


def usable_cores(cores: int, quotas: Sequence[CpuQuota]) -> int:
    """Cores that can be kept busy: those that are allowed, or the CPU time that a group has, rounded up."""
    return max(1, min([cores, *(math.ceil(quota.cores) for quota in quotas)]))


def derive_budget(memory: Memory | None, limits: Sequence[MemoryLimit], limit: int | None) -> Budget:
    """Calculate the budget from free memory and control groups; `limit` is `limits.memory` of device.toml."""
    steps = [] if memory is None else _from_memory(memory)
    steps += [_from_group(group) for group in limits]
    counts = [num_bytes for num_bytes, _ in steps if num_bytes is not None]
    reasons = [reason for _, reason in steps]
    if limit is not None:
        reasons.append(_from_owner(limit, min(counts, default=None)))
        return Budget(num_bytes=limit, reasons=tuple(reasons))
    if len(counts) > 1:
        reasons.append(f"the smallest counts: {format_bytes(min(counts))}")
    return Budget(num_bytes=min(counts, default=0), reasons=tuple(reasons))


def reserve_bytes(memory: Memory) -> int:
    """The memory that is left to the system."""
    return max(_RESERVE_BYTES, memory.total_bytes // _RESERVE_SHARE)


def _from_memory(memory: Memory) -> list[tuple[int | None, str]]:
    reserve = reserve_bytes(memory)
    usable = max(0, memory.available_bytes - reserve) * _USABLE_PERCENT // 100
    available, total = format_bytes(memory.available_bytes), format_bytes(memory.total_bytes)
    return [
        (None, f"MemAvailable: {available} of {total} are available"),
        (None, f"reserve: {format_bytes(reserve)} are left to the system (10 % of MemTotal, at least 128 MB)"),
        (usable, f"{_USABLE_PERCENT} % of the rest, because other programs grow meanwhile: {format_bytes(usable)}"),
    ]


def _from_group(limit: MemoryLimit) -> tuple[int | None, str]:
    allowed, used, left = (format_bytes(n) for n in (limit.limit_bytes, limit.used_bytes, limit.headroom_bytes))
    where = f"cgroup v{limit.version} {limit.group}"
    return limit.headroom_bytes, f"{where}: {limit.file} allows {allowed}, {used} are used: {left} are left"


def _from_owner(limit: int, derived: int | None) -> str:
    reason = f"limits.memory of device.toml stands above all: {format_bytes(limit)}"
    if derived is not None and limit > derived:
        reason += f"; that is more than the {format_bytes(derived)} that are free, so the system may end a worker"
    return reason
