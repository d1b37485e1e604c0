"""Finds NVIDIA GPUs, and whether they have separate memory.

The kernel driver tells the names below `/proc`; memory is asked of NVML (`nvidia-ml-py`), where that is installed and
only on the running system. GPUs of a system-on-chip (Jetson, GB10) share the memory of the system: NVML answers "not
supported" for them, and `MemAvailable` is the truth. Does not cover: GPUs of AMD, Intel and Apple.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.config.quantities import format_bytes
from edge_client.device.tree import Tree, printable

__all__ = [
    "Accelerator",
    "Nvml",
    "NvmlAnswer",
    "User",
    "ask_nvml",
    "ask_users",
    "discrete",
    "integrated",
    "nvmap_bytes",
]

_DRIVER = "/proc/driver/nvidia/gpus"
_ON_CHIP = {
    "tegra210": "Maxwell",
    "tegra186": "Pascal",
    "tegra194": "Volta",
    "tegra234": "Ampere",
    "tegra264": "Blackwell",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A processor beside the CPU."""

    name: str
    memory: str  # unified: the system's; separate: its own; unknown
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlAnswer:
    """The answer of NVML: (total, free) per GPU, None for one without separate memory; or the reason for no answer."""

    memory: Sequence[tuple[int, int] | None] = ()
    reason: str = ""


Nvml = Callable[[], NvmlAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A process that holds memory of a GPU."""

    pid: int
    num_bytes: int | None = None  # None: the driver does not say

    def __str__(self) -> str:
        size = format_bytes(self.num_bytes) if self.num_bytes is not None else "some memory"
        return f"pid {self.pid} ({_command_name(self.pid)}) has {size}"


def _command_name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return printable(file.read().strip(), 32)
    except OSError:
        return "not visible from here"


def integrated(compatible: Sequence[str]) -> Accelerator | None:
    """The GPU of a Jetson, from the names that its device tree has for the chip."""
    for name in compatible:
        chip = name.removeprefix("nvidia,")
        if chip in _ON_CHIP:
            return Accelerator(name=f"NVIDIA {_ON_CHIP[chip]} GPU of {chip}", memory="unified")
    return None


def discrete(tree: Tree, *, container: bool, nvml: Nvml | None) -> tuple[Accelerator, ...]:
    """The GPUs of a host; in a container only if it was given one, because `/proc` shows those of the host."""
    if container and not any(re.fullmatch(r"nvidia\d+", name) for name in tree.names("/dev")):
        return ()
    names = [_name(tree, folder) for folder in tree.names(_DRIVER)]
    if not names or nvml is None:
        return tuple(Accelerator(name=name, memory="unknown") for name in names)
    answer = nvml()
    if answer.reason:
        tree.notes.append(f"the GPU's memory is not known: {answer.reason}")
    known: list[tuple[int, int] | str | None] = [*answer.memory[: len(names)]]
    known += ["not reported"] * (len(names) - len(known))
    return tuple(_with_memory(name, memory) for name, memory in zip(names, known, strict=True))


def _name(tree: Tree, folder: str) -> str:
    match = re.search(r"^Model:\s*(.+)$", tree.text(f"{_DRIVER}/{folder}/information") or "", re.MULTILINE)
    return printable(match[1]) if match else "NVIDIA GPU"


def _with_memory(name: str, memory: tuple[int, int] | str | None) -> Accelerator:
    if isinstance(memory, str):
        return Accelerator(name=name, memory="unknown")
    if memory is None:
        return Accelerator(name=name, memory="unified")
    return Accelerator(name=name, memory="separate", total_bytes=memory[0], free_bytes=memory[1])


def ask_nvml() -> NvmlAnswer:
    """Ask the driver's library; never fails."""
    try:
        library: Any = importlib.import_module("pynvml")
    except ImportError:
        return NvmlAnswer(reason="nvidia-ml-py is not installed (pip install nvidia-ml-py)")
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return NvmlAnswer(reason=f"NVML does not answer: {printable(str(error))}")
    try:
        handles = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
        return NvmlAnswer(memory=[_memory(library, handle) for handle in handles])
    except library.NVMLError as error:
        return NvmlAnswer(reason=f"NVML answers: {printable(str(error))}")
    finally:
        library.nvmlShutdown()


def ask_users(index: int) -> tuple[User, ...]:
    """The processes that compute on a GPU, as the driver's library tells them; none where it does not."""
    try:
        library: Any = importlib.import_module("pynvml")
    except ImportError:
        return ()
    try:
        library.nvmlInit()
        handle = library.nvmlDeviceGetHandleByIndex(index)
        processes = library.nvmlDeviceGetComputeRunningProcesses(handle)
        return tuple(User(pid=int(one.pid), num_bytes=one.usedGpuMemory) for one in processes)
    except library.NVMLError:
        return ()


def nvmap_bytes(tree: Tree) -> int | None:
    """Memory that a Jetson's GPU has of the system's, for all processes; None where the driver does not tell."""
    match = re.search(r"^NvMapMemUsed:\s*(\d{1,16}) kB$", tree.text("/proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _memory(library: Any, handle: Any) -> tuple[int, int] | None:
    try:
        info = library.nvmlDeviceGetMemoryInfo(handle)
    except library.NVMLError_NotSupported:
        return None
    return (int(info.total), int(info.free)) if info.total else None
