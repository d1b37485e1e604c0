"""Guards with which a worker protects its device: it ends with its parent, returns freed memory, and fails cleanly.

Covers: parent-death signal, glibc's malloc thresholds, RLIMIT_DATA, the OOM score, and a quick exit. A guard does
nothing on systems without it (macOS); a refusal by the kernel is logged, because a worker without it still trains.
Does not cover: control groups (`worker_group`), and deciding what fits (`planning`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
from typing import NoReturn

from edge_client.device import meter

__all__ = [
    "die_with_parent",
    "end",
    "keep_freed_memory",
    "lift_limit",
    "limit_growth",
    "pin_malloc",
    "raise_oom_score",
    "return_freed_memory",
]

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_THRESHOLD = -3
_KEPT_MMAP_THRESHOLD_BYTES = 32 * 2**20  # the largest that glibc takes
_KEPT_TRIM_THRESHOLD_BYTES = 2**31 - 1
_MALLOC_THRESHOLD_BYTES = 64 * 1024  # 1 MB leaves small tensors on the heap, where they fragment it: 48 MB for 33 MB


def die_with_parent(parent: int | None = None) -> None:
    """Get SIGKILL when the parent ends, and end now if it already has.

    Pass the process id of the `parent` where it is known: else a parent that ended before this call goes unnoticed.
    The signal follows the parent's *thread*: whoever starts workers does so from a thread that lives as long as they.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _log.warning("cannot ask for a signal at the parent's end: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # it ended before prctl: no signal will ever come
        os.kill(os.getpid(), signal.SIGKILL)


def pin_malloc() -> None:
    """Fix glibc's mmap threshold so that a freed tensor goes back to the system; call it before torch is loaded.

    glibc raises the threshold by itself at the first large free; tensors then fragment the heap (+45 to +73 % RSS).
    """
    _set_thresholds(_MALLOC_THRESHOLD_BYTES, _MALLOC_THRESHOLD_BYTES)


def keep_freed_memory() -> None:
    """The opposite: what is freed stays with the process, and the next batch need not ask the kernel for it."""
    _set_thresholds(_KEPT_MMAP_THRESHOLD_BYTES, _KEPT_TRIM_THRESHOLD_BYTES)


def return_freed_memory() -> None:
    """Give back what `keep_freed_memory` has let this process keep, and pin malloc again."""
    pin_malloc()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl gives memory back anyway
        return
    for parameter, num_bytes in ((_M_MMAP_THRESHOLD, mmap_bytes), (_M_TRIM_THRESHOLD, trim_bytes)):
        if mallopt(parameter, num_bytes) != 1:
            _log.warning("mallopt(%d) was refused; the worker may use more memory than planned", parameter)


def limit_growth(extra_bytes: int) -> None:
    """Let this process grow by `extra_bytes` of private memory from now; beyond that an allocation fails.

    The limit counts virtual memory, so it is set relative to the measured VmData, never absolute.
    """
    if extra_bytes < 0:
        raise ValueError(f"expected room of at least 0 bytes, got {extra_bytes}")
    if sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = meter.data_bytes() + extra_bytes
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def lift_limit() -> None:
    """Undo `limit_growth`."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def raise_oom_score(score: int = 800) -> None:
    """Make this process the kernel's first choice when the device runs out of memory."""
    if not 0 <= score <= 1000:
        raise ValueError(f"expected an OOM score from 0 to 1000, got {score}")
    if sys.platform != "linux":
        return
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    except OSError as error:
        _log.warning("cannot set the OOM score: %s", error.strerror)


def end(code: int) -> NoReturn:
    """End this process at once; unloading torch's modules takes a third of the time of a short worker."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a reader that is gone, a closed stream
            stream.flush()
    os._exit(code)
