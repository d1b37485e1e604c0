"""Reads what a device is from `/proc`, `/sys` and `/etc`: facts, no conclusions.

Covers: Jetson and Raspberry Pi by their device tree, containers, NVIDIA GPUs, memory, swap, cores, control groups, and
the installed torch, which is never loaded. Does not cover: what a worker may use (`profile`).
All paths are below a root, so that a recorded system is read like this one. The daemon imports this module, so it
loads nothing heavy.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client.device import cgroups, gpus
from edge_client.device.gpus import Accelerator, Nvml
from edge_client.device.tree import Tree, printable

__all__ = ["Memory", "Swap", "System", "TorchBuild", "find_torch", "probe", "read_memory"]

_MOST_BYTES = 2**53  # more is no memory but garbage, and no message could carry it
_MOST_CORES = 65_536
_TREES = ("/proc/device-tree", "/sys/firmware/devicetree/base")
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is ARM's
_CONTAINER_FILES = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"))
_CONTAINER_GROUPS = r"/(docker|kubepods|lxc|libpod|containerd|crio|buildkit|garden)\b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of the whole system."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A swap device: reported, but never counted as memory."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The facts about a system."""

    kind: str  # jetson | raspberry-pi | gpu-host | container | host
    model: str
    machine: str  # of the processor: aarch64, x86_64
    release: str  # Jetson Linux
    container: str  # docker, podman, ..., other; empty: none
    memory: Memory | None  # None: /proc/meminfo makes no sense
    swaps: tuple[Swap, ...]
    cores: int  # that this process may use
    accelerators: tuple[Accelerator, ...]
    groups: cgroups.Cgroups
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch, read without loading it."""

    version: str
    cuda: str  # that it was built for; empty: none


def probe(root: Path = Path("/"), *, nvml: Nvml | None = None) -> System:
    """Read a system; `nvml` is asked for the memory of discrete GPUs."""
    tree = Tree(root)
    groups = cgroups.read_cgroups(tree)
    compatible = _compatible(tree)
    board = _board_model(tree)
    release = tree.line("/etc/nv_tegra_release")
    chip = gpus.integrated(compatible)
    kind = "jetson" if chip or release else "raspberry-pi" if _is_pi(compatible, board) else ""
    container = _container(tree, groups)
    accelerators: tuple[Accelerator, ...] = ()
    if kind == "jetson":  # NVML answers "not supported", or is not there
        accelerators = (chip or Accelerator(name="NVIDIA GPU of this Jetson", memory="unified"),)
    elif not kind:
        accelerators = gpus.discrete(tree, container=bool(container), nvml=nvml)
    return System(
        kind=kind or ("gpu-host" if accelerators else "container" if container else "host"),
        model=board or _host_model(tree),
        machine=_machine(tree),
        release=_jetson_linux(release),
        container=container,
        memory=read_memory(tree),
        swaps=_swaps(tree),
        cores=_cores(tree),
        accelerators=accelerators,
        groups=groups,
        notes=tuple(tree.notes),
    )


@functools.cache
def find_torch() -> TorchBuild | None:
    """Find the torch that this Python would load."""
    from importlib import metadata  # it loads the email package: not for the daemon

    try:
        package = metadata.distribution("torch")
        text = Path(str(package.locate_file("torch/version.py"))).read_text(encoding="utf-8", errors="replace")
    except metadata.PackageNotFoundError:
        return None
    except OSError:
        text = ""
    match = re.search(r"^cuda\b[^=\n]*= ['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return TorchBuild(version=printable(package.version, 64), cuda=match[1] if match else "")


def native_bf16(root: Path = Path("/")) -> bool:
    """Whether every core computes in bfloat16; others take 7 to 16 times as long as in float32."""
    text = Tree(root).text("/proc/cpuinfo") or ""
    cores = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return bool(cores) and all(_BF16_FLAGS.intersection(flags.split()) for flags in cores)


def _compatible(tree: Tree) -> list[str]:
    texts = (tree.text(f"{base}/compatible") for base in _TREES)
    return next((text.split("\0") for text in texts if text), [])


def _board_model(tree: Tree) -> str:
    """The board's name; inside of many containers the device tree is hidden, and a Raspberry Pi's cpuinfo tells it."""
    for base in _TREES:
        if name := tree.line(f"{base}/model"):
            return name
    return _cpu_field(tree, "Model")


def _host_model(tree: Tree) -> str:
    names = (tree.line(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name"))
    return printable(" ".join(name for name in names if name)) or _cpu_field(tree, "model name")


def _cpu_field(tree: Tree, name: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.+)$", tree.text("/proc/cpuinfo") or "", re.MULTILINE)
    return printable(match[1]) if match else ""


def _machine(tree: Tree) -> str:
    return tree.line("/proc/sys/kernel/arch") or (os.uname().machine if tree.is_this_machine else "")


def _is_pi(compatible: Sequence[str], board: str) -> bool:
    return any(name.startswith("raspberrypi,") for name in compatible) or board.startswith("Raspberry Pi")


def _jetson_linux(line: str) -> str:
    """`# R36 (release), REVISION: 4.3, ...` as `R36.4.3`."""
    match = re.match(r"# (R\d+) \(release\), REVISION: ([\d.]+)", line)
    return f"{match[1]}.{match[2]}" if match else ""


def _container(tree: Tree, groups: cgroups.Cgroups) -> str:
    if named := tree.line("/run/systemd/container"):
        return named
    for path, name in _CONTAINER_FILES:
        if tree.exists(path):
            return name
    if match := re.search(_CONTAINER_GROUPS, tree.text("/proc/self/cgroup") or ""):
        return match[1]
    return "other" if groups.namespaced else ""


def read_memory(tree: Tree) -> Memory | None:
    """How much memory the system has and how much of it is available; None if `/proc/meminfo` makes no sense."""
    if tree.is_this_machine and sys.platform != "linux":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Memory(total_bytes=total, available_bytes=total // 2)  # macOS does not say; it serves for development
    text = tree.text("/proc/meminfo") or ""
    lines = re.findall(r"^(MemTotal|MemAvailable):\s*(\d{1,16}) kB$", text, re.MULTILINE)
    sizes = {name: int(size) * 1024 for name, size in lines}
    if len(sizes) < 2 or not 0 < sizes["MemTotal"] <= _MOST_BYTES:
        return None
    return Memory(total_bytes=sizes["MemTotal"], available_bytes=min(sizes["MemTotal"], sizes["MemAvailable"]))


def _swaps(tree: Tree) -> tuple[Swap, ...]:
    """`/dev/zram0  partition  4194300  0  100`, below a line of titles."""
    lines = re.findall(r"^(/\S+)\s+\w+\s+(\d{1,16})\s", tree.text("/proc/swaps") or "", re.MULTILINE)
    swaps = ((printable(name.removeprefix("/dev/"), 64), int(size) * 1024) for name, size in lines)
    return tuple(Swap(name=name, num_bytes=num_bytes) for name, num_bytes in swaps)


def _cores(tree: Tree) -> int:
    """What is switched on and allowed; the kernel also allows cores that do not exist."""
    online = _cpu_list(tree.line("/sys/devices/system/cpu/online"))
    if not online:
        cpus = re.findall(r"^processor\s*:\s*(\d{1,5})$", tree.text("/proc/cpuinfo") or "", re.MULTILINE)
        online = {int(cpu) for cpu in cpus}
    if not online and tree.is_this_machine:
        online = set(range(os.cpu_count() or 1))
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", tree.text("/proc/self/status") or "", re.MULTILINE)
    allowed = _cpu_list(match[1]) if match else set()
    return len(online & allowed or online) or 1


def _cpu_list(text: str) -> set[int]:
    """`0-3,8` as a set; nothing if it makes no sense."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if not match:
            return set()
        cpus.update(range(int(match[1]), min(int(match[2] or match[1]), _MOST_CORES) + 1))
    return cpus
