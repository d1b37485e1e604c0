"""Reads what control groups allow this process: memory and CPU time, from its group up to the visible top.

Covers: version 1, version 2 and both mounted at once; containers, with and without a namespace of their own; limits of
systemd, which are control groups. Does not cover: swap limits, because swap is never counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from edge_client.device.tree import Tree, printable

__all__ = ["Cgroups", "CpuQuota", "MemoryLimit", "group_of_this_process", "read_cgroups"]

_UNLIMITED = 2**62  # version 1 writes 9223372036854771712 for "no limit": 2^63 - 1, rounded down to a page
_MAX_LEVELS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A group that bounds the memory of all processes in it."""

    version: int
    group: str
    file: str
    limit_bytes: int
    used_bytes: int  # without file pages that the kernel gives back when they are needed

    @property
    def headroom_bytes(self) -> int:
        """The memory that the group may still use."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuQuota:
    """A group that bounds CPU time."""

    group: str
    cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroups:
    """The limits that control groups set for this process."""

    memory_controller: str  # v1 | v2 | off | hidden | none
    memory: tuple[MemoryLimit, ...]
    cpu: tuple[CpuQuota, ...]
    namespaced: bool  # the visible top is not the real one: a container


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    kind: str  # cgroup | cgroup2
    root: str  # which group of the hierarchy is mounted
    at: str
    controllers: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hierarchy:
    """One hierarchy as this process sees it."""

    version: int
    levels: tuple[tuple[str, str], ...]  # (group, directory), the process's own first


def read_cgroups(tree: Tree) -> Cgroups:
    """Read all limits that apply to this process."""
    groups = dict(_memberships(tree.text("/proc/self/cgroup") or ""))
    mounts = list(_mounts(tree))
    unified = _hierarchy("", groups, mounts)
    memory = _hierarchy("memory", groups, mounts)
    cpu = _hierarchy("cpu", groups, mounts) or unified
    top = unified.levels[-1][1] if unified else ""
    if memory is None and unified and "memory" in (tree.text(f"{top}/cgroup.controllers") or "").split():
        memory = unified
    return Cgroups(
        memory_controller=f"v{memory.version}" if memory else _without_memory(tree, unified, groups),
        memory=tuple(_memory_limits(tree, memory)) if memory else (),
        cpu=tuple(_cpu_quotas(tree, cpu)) if cpu else (),
        namespaced=bool(top) and tree.exists(f"{top}/cgroup.type"),  # the real top has no such file
    )


def group_of_this_process(tree: Tree) -> str | None:
    """The directory of this process's own group in version 2; None where it is not visible."""
    groups = dict(_memberships(tree.text("/proc/self/cgroup") or ""))
    unified = _hierarchy("", groups, list(_mounts(tree)))
    return unified.levels[0][1] if unified else None


def _without_memory(tree: Tree, unified: _Hierarchy | None, groups: dict[str, str]) -> str:
    """Why no group limits memory: the controller is switched off in the kernel, or not visible from here."""
    disabled = re.search(r"^memory\s+\d+\s+\d+\s+0$", tree.text("/proc/cgroups") or "", re.MULTILINE)
    if disabled or (unified and tree.exists(f"{unified.levels[-1][1]}/cgroup.controllers")):
        return "off"
    return "hidden" if groups else "none"


def _memberships(text: str) -> Iterator[tuple[str, str]]:
    """(controller, group) of `/proc/self/cgroup`; version 2 is the controller without a name."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, group = rest.partition(":")
        if colon and number.isdigit() and group.startswith("/"):
            for controller in controllers.split(","):
                yield controller, group


def _mounts(tree: Tree) -> Iterator[_Mount]:
    text = tree.text("/proc/self/mountinfo")
    if text is None:  # hidden, or not copied: the usual places
        yield from _usual_mounts(tree)
        return
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(" "), after.split(" ")
        if len(place) >= 6 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            names = frozenset(kind[2].split(",")) if kind[0] == "cgroup" else frozenset(("",))
            yield _Mount(kind=kind[0], root=_unescape(place[3]), at=_unescape(place[4]), controllers=names)


def _usual_mounts(tree: Tree) -> Iterator[_Mount]:
    for at in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        if tree.exists(f"{at}/cgroup.controllers"):
            yield _Mount(kind="cgroup2", root="/", at=at, controllers=frozenset(("",)))
    for controller, file in (("memory", "memory.limit_in_bytes"), ("cpu", "cpu.cfs_quota_us")):
        if tree.exists(f"/sys/fs/cgroup/{controller}/{file}"):
            at = f"/sys/fs/cgroup/{controller}"
            yield _Mount(kind="cgroup", root="/", at=at, controllers=frozenset((controller,)))


def _unescape(text: str) -> str:
    """mountinfo writes a space as `\\040`."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), text)


def _hierarchy(controller: str, groups: dict[str, str], mounts: list[_Mount]) -> _Hierarchy | None:
    mount = next((m for m in mounts if controller in m.controllers), None)
    if mount is None or controller not in groups:
        return None
    group = os.path.normpath(groups[controller]).replace("//", "/")
    inside = _below(group, os.path.normpath(mount.root).replace("//", "/"))
    levels = []
    for _ in range(_MAX_LEVELS):
        levels.append((inside, mount.at if inside == "/" else mount.at + inside))
        if inside == "/":
            break
        inside = os.path.dirname(inside)
    return _Hierarchy(version=2 if mount.kind == "cgroup2" else 1, levels=tuple(levels))


def _below(group: str, root: str) -> str:
    """A group as seen from the one that is mounted; its top if the process is not below it."""
    if root == "/":
        return group
    return group[len(root) :] if group.startswith(f"{root}/") else "/"


def _memory_limits(tree: Tree, hierarchy: _Hierarchy) -> Iterator[MemoryLimit]:
    read = _limit_v2 if hierarchy.version == 2 else _limit_v1
    limits = [limit for group, at in hierarchy.levels if (limit := read(tree, group, at))]
    if hierarchy.version == 1:
        limits += _hidden_limit(tree, hierarchy, limits)
    return (replace(limit, group=printable(limit.group)) for limit in limits)


def _limit_v2(tree: Tree, group: str, at: str) -> MemoryLimit | None:
    bounds = [(tree.number(f"{at}/{file}", unlimited="max"), file) for file in ("memory.max", "memory.high")]
    known = [(value, file) for value, file in bounds if value is not None and 0 <= value < _UNLIMITED]
    if not known:
        return None
    used = (tree.number(f"{at}/memory.current") or 0) - _stat(tree, at, "inactive_file")
    return MemoryLimit(version=2, group=group, file=min(known)[1], limit_bytes=min(known)[0], used_bytes=max(0, used))


def _limit_v1(tree: Tree, group: str, at: str) -> MemoryLimit | None:
    limit = tree.number(f"{at}/memory.limit_in_bytes")
    if limit is None or not 0 <= limit < _UNLIMITED:
        return None
    file = "memory.limit_in_bytes"
    return MemoryLimit(version=1, group=group, file=file, limit_bytes=limit, used_bytes=_used_v1(tree, at))


def _used_v1(tree: Tree, at: str) -> int:
    return max(0, (tree.number(f"{at}/memory.usage_in_bytes") or 0) - _stat(tree, at, "total_inactive_file"))


def _hidden_limit(tree: Tree, hierarchy: _Hierarchy, visible: list[MemoryLimit]) -> list[MemoryLimit]:
    """A limit of a group above the visible top, which version 1 reports in `memory.stat`."""
    group, at = hierarchy.levels[0]
    limit = _stat(tree, at, "hierarchical_memory_limit") or _UNLIMITED
    if limit >= min([_UNLIMITED, *(known.limit_bytes for known in visible)]):
        return []
    file = "memory.stat"
    return [MemoryLimit(version=1, group=group, file=file, limit_bytes=limit, used_bytes=_used_v1(tree, at))]


def _stat(tree: Tree, at: str, name: str) -> int:
    """One value of `memory.stat`, 0 without it."""
    match = re.search(rf"^{name} (\d{{1,20}})$", tree.text(f"{at}/memory.stat") or "", re.MULTILINE)
    return int(match[1]) if match else 0


def _cpu_quotas(tree: Tree, hierarchy: _Hierarchy) -> Iterator[CpuQuota]:
    for group, at in hierarchy.levels:
        quota, period = _quota_v2(tree, at) if hierarchy.version == 2 else _quota_v1(tree, at)
        if quota > 0 and period > 0:
            yield CpuQuota(group=printable(group), cores=round(quota / period, 3))


def _quota_v2(tree: Tree, at: str) -> tuple[int, int]:
    text = tree.text(f"{at}/cpu.max") or "max"
    if match := re.fullmatch(r"(\d{1,18}) (\d{1,18})", text.strip()):
        return int(match[1]), int(match[2])
    if not text.startswith("max"):
        tree.add_unreadable_note(f"{at}/cpu.max", text)
    return 0, 0


def _quota_v1(tree: Tree, at: str) -> tuple[int, int]:
    return tree.number(f"{at}/cpu.cfs_quota_us") or 0, tree.number(f"{at}/cpu.cfs_period_us") or 0  # -1: no quota
