"""Reads a process's private memory: what only its end gives back to the device. Budgets are budgets of it.

    private    anonymous pages in RAM (`RssAnon`) and swapped ones (`VmSwap`)
    file       pages of libraries and mapped files (`RssFile`, `RssShmem`): the kernel drops and rereads them at will
    RSS        anonymous pages in RAM, and file pages

A warm worker is forked from a template and shares most of the template's pages. It answers for all that the template
holds and for what it has written to since the fork; when the template ends, every page is the worker's own.

Covers: this process and others, now and at the peak. Does not cover: limits (`guard`), budgets (`profile`), memory of
accelerators (`accelerator`). Outside Linux (macOS, for development) a process's peak RSS stands for all of it.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from edge_client.device import meter

__all__ = ["PeakMeter", "ProcessMemory", "process_memory", "worker_bytes", "written_since_fork"]

_STATUS = re.compile(r"^(RssAnon|RssFile|RssShmem|VmSwap|VmRSS|VmHWM):\s+(\d{1,16}) kB$", re.MULTILINE)
_MOST_CORES = 8  # that the few threads of a worker visit in a step, on a host with many


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """A process's memory; all zeros if it has ended."""

    anonymous_bytes: int = 0
    swapped_bytes: int = 0
    file_bytes: int = 0
    peak_rss_bytes: int = 0

    @property
    def private_bytes(self) -> int:
        """What nobody else uses and nothing but the process's end, or the process itself, gives back."""
        return self.anonymous_bytes + self.swapped_bytes

    @property
    def rss_bytes(self) -> int:
        """What is in RAM."""
        return self.anonymous_bytes + self.file_bytes


def process_memory(pid: int | None = None, *, root: Path = Path("/")) -> ProcessMemory:
    """The memory of this process, or of another one; `root` is where `/proc` is."""
    sizes = _status(pid, root)
    if pid is None and not sizes:
        peak = meter.peak_rss_bytes()
        return ProcessMemory(anonymous_bytes=peak, peak_rss_bytes=peak)
    file_bytes = sizes.get("RssFile", 0) + sizes.get("RssShmem", 0)
    anonymous = sizes.get("RssAnon", sizes.get("VmRSS", 0))  # before Linux 4.5 nobody tells them apart
    return ProcessMemory(
        anonymous_bytes=anonymous,
        swapped_bytes=sizes.get("VmSwap", 0),
        file_bytes=file_bytes,
        peak_rss_bytes=sizes.get("VmHWM", anonymous + file_bytes),
    )


def written_since_fork(template: int, pid: int | None = None, *, root: Path = Path("/")) -> int:
    """The private memory that a process does not share with the `template` it was forked from; all, if that has ended.

    Takes milliseconds, because the kernel walks all pages. Where it does not tell what is shared, nothing is.
    """
    return _own_bytes(process_memory(pid, root=root), _shared(template, pid, root))


def worker_bytes(pid: int | None = None, *, template: int | None = None, root: Path = Path("/")) -> int:
    """The private memory that a worker answers for: its own, and all that its template holds."""
    if template is None:
        return process_memory(pid, root=root).private_bytes
    return process_memory(template, root=root).private_bytes + written_since_fork(template, pid, root=root)


class PeakMeter:
    """The highest private memory that this process has answered for.

    The kernel keeps the highest RSS only. At that moment the process had at least the fewest file pages that it ever
    had, and shared with its template at least the pages that it shares now. The rest of the highest RSS is therefore an
    upper bound of the private memory. It is too high by the file pages read since `begin` (1 to 3 MB in training), by
    the template's pages that were written to after the peak, and by what the kernel's own count may be off.
    """

    def __init__(self, template: int | None = None) -> None:
        """`template` is the process that this one was forked from; None for a process that was not."""
        self._template = template
        self.begin()

    def begin(self) -> bool:
        """Measure the peak from now on; False where the system cannot: it is the peak RSS since the process began."""
        can_reset = meter.reset_peak()
        self._fewest_file_bytes = process_memory().file_bytes if can_reset else 0
        self._most_swapped_bytes = 0
        self._most_bytes = 0
        return can_reset

    def private_bytes(self) -> int:
        """The private memory now."""
        return worker_bytes(template=self._template)

    def peak_bytes(self) -> int:
        """The highest since `begin`. Call it now and then: the kernel may have dropped file pages for a while."""
        memory = process_memory()
        shared = _NOTHING if self._template is None else _shared(self._template, None, Path("/"))
        template = 0 if self._template is None else process_memory(self._template).private_bytes
        self._fewest_file_bytes = min(self._fewest_file_bytes, memory.file_bytes)
        self._most_swapped_bytes = max(self._most_swapped_bytes, min(memory.swapped_bytes, shared.most_swapped_bytes))
        resident = memory.peak_rss_bytes - self._fewest_file_bytes + _counting_error_bytes()
        highest = max(0, resident - shared.num_bytes) + self._most_swapped_bytes
        self._most_bytes = max(self._most_bytes, template + _own_bytes(memory, shared), template + highest)
        return self._most_bytes


@functools.cache
def _counting_error_bytes() -> int:
    """How much the highest RSS may be off: each core adds to the kernel's counts when it has a batch of pages together.

    Two counts, of anonymous and of file pages. Measured with two cores, where this is 512 KiB: up to 270 KiB below.
    """
    cores = min(os.cpu_count() or 1, _MOST_CORES)
    return 2 * cores * max(32, 2 * cores) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What a process shares with its template."""

    num_bytes: int = 0  # of its anonymous pages in RAM
    most_swapped_bytes: int = 2**53  # at least the swapped pages that are its own


_NOTHING = _Shared()


def _shared(template: int, pid: int | None, root: Path) -> _Shared:
    """Anonymous pages that several processes have mapped; at most as many as the template has left."""
    shared, most_swapped, dirty, is_told = 0, 0, 0, False
    try:
        with (_process(pid, root) / "smaps").open("rb") as lines:  # 25 lines for each mapping
            for line in lines:
                if line.startswith(b"Shared_Dirty:"):
                    dirty = _bytes(line)
                elif line.startswith(b"Anonymous:"):  # a shared file's dirty pages are none
                    shared += min(dirty, _bytes(line))
                elif line.startswith(b"SwapPss:"):  # of n processes, a swapped page counts as 1/n in each
                    most_swapped, is_told = most_swapped + _bytes(line), True
    except OSError:
        return _NOTHING
    held = process_memory(template, root=root).anonymous_bytes
    return _Shared(num_bytes=min(shared, held), most_swapped_bytes=most_swapped) if is_told else _NOTHING


def _own_bytes(memory: ProcessMemory, shared: _Shared) -> int:
    return max(0, memory.anonymous_bytes - shared.num_bytes) + min(memory.swapped_bytes, shared.most_swapped_bytes)


def _status(pid: int | None, root: Path) -> dict[str, int]:
    """Sizes in bytes; none if the process has ended, or the system does not tell."""
    try:
        text = (_process(pid, root) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {name: int(kilobytes) * 1024 for name, kilobytes in _STATUS.findall(text)}


def _process(pid: int | None, root: Path) -> Path:
    return root / "proc" / ("self" if pid is None else str(pid))


def _bytes(line: bytes) -> int:
    """`Anonymous:   1024 kB`."""
    return int(line.split()[1]) * 1024
