"""The test accelerator for Python: `torch.device("fedtest:0")` trains, and has memory of its own.

    fedtest:0   discrete: memory of its own, as that of a graphics card
    fedtest:1   unified: it uses the host's memory, as a Jetson's GPU

`register()` once in a process; a program that was started with this folder and `autoload` in PYTHONPATH has it as soon
as it loads torch (from 2.5 on), by an entry point of the kind that torch's vendors use. The module that torch
then knows as `torch.fedtest` has the names of `torch.cuda`; those that begin with an underscore play the world around.

    FEDTEST_DEVICES   the forms, such as discrete,discrete,unified
    FEDTEST_LEDGER    a file by which processes share the memory of the devices; without it each has them for itself
    FEDTEST_CONTEXT   bytes that each process takes of a device before it is served
"""

from __future__ import annotations

import os
import types
from dataclasses import dataclass
from typing import Any

import torch
from fedtest_build import built

__all__ = ["autoload", "register", "trace"]

NAME = "fedtest"
_ALLOCATED, _RESERVED, _PEAK_ALLOCATED, _PEAK_RESERVED, _OOMS, _RETRIES, _TOTAL, _HELD = range(8)


@dataclass(frozen=True, slots=True)
class _Properties:
    name: str
    is_integrated: bool
    total_memory: int


def autoload() -> None:
    """What torch calls when it is loaded."""
    register()


def register(forms: str = "") -> Any:
    """Load the library and tell torch of the devices; a second call returns the module."""
    if hasattr(torch, NAME):
        return getattr(torch, NAME)
    names = (forms or os.environ.get("FEDTEST_DEVICES") or "discrete,unified").split(",")
    if set(names) - {"discrete", "unified"}:
        raise ValueError(f"expected forms of devices such as discrete,unified, got {names}")
    known: Any = torch  # its functions for extensions have no types
    known.ops.load_library(str(built()))
    known.ops.fedtest.set_up(len(names))
    known.utils.rename_privateuse1_backend(NAME)
    module = _module(names)
    known._register_device_module(NAME, module)
    known.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=False)
    return module


def _index(device: object = None) -> int:
    if device is None:
        return _do("current", 0, 0)
    if isinstance(device, int):
        return device
    return torch.device(str(device)).index or 0


def _stats(device: object = None) -> list[int]:
    return list(torch.ops.fedtest.stats(_index(device)))


def _do(what: str, value: int = 0, device: object = None) -> int:
    return int(torch.ops.fedtest.command(_index(device), what, value))


def _module(forms: list[str]) -> types.ModuleType:
    module: Any = types.ModuleType(f"torch.{NAME}")

    def set_per_process_memory_fraction(fraction: float, device: object = None) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"expected a fraction from 0 to 1, got {fraction}")
        _do("allowed", int(fraction * _stats(device)[_TOTAL]), device)

    def mem_get_info(device: object = None) -> tuple[int, int]:
        _do("context", 0, device)
        found = _stats(device)
        return max(0, found[_TOTAL] - found[_HELD]), found[_TOTAL]

    def get_device_properties(device: object = None) -> _Properties:
        form = forms[_index(device)]
        return _Properties(f"test accelerator ({form})", form == "unified", _stats(device)[_TOTAL])

    def manual_seed_all(seed: int) -> None:
        for device in range(len(forms)):
            _do("seed", seed % 2**63, device)

    def users(device: object = None) -> dict[int, int]:
        flat = torch.ops.fedtest.users(_index(device))
        return dict(zip(flat[::2], flat[1::2], strict=True))

    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: len(forms)
    module.current_device = lambda: _do("current", 0, 0)
    module.set_device = lambda device: _do("set", 0, device)
    module.get_device_properties = get_device_properties
    module.memory_allocated = lambda device=None: _stats(device)[_ALLOCATED]
    module.memory_reserved = lambda device=None: _stats(device)[_RESERVED]
    module.max_memory_allocated = lambda device=None: _stats(device)[_PEAK_ALLOCATED]
    module.max_memory_reserved = lambda device=None: _stats(device)[_PEAK_RESERVED]
    module.reset_peak_memory_stats = lambda device=None: _do("reset_peak", 0, device)
    module.empty_cache = lambda: [_do("empty_cache", 0, device) for device in range(len(forms))]
    module.set_per_process_memory_fraction = set_per_process_memory_fraction
    module.mem_get_info = mem_get_info
    module.device_memory_used = lambda device=None: _stats(device)[_HELD]  # as the driver tells it, without a context
    module.synchronize = lambda device=None: None
    module.manual_seed = lambda seed: _do("seed", seed % 2**63)
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device=None: torch.ops.fedtest.state(_index(device))
    module.set_rng_state = lambda state, device=None: torch.ops.fedtest.set_state(_index(device), state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.num_ooms = lambda device=None: _stats(device)[_OOMS]
    # what a test plays: the size of a device, what other programs hold of it; and who holds what, as NVML tells it
    module._set_total = lambda total, device=None: _do("total", total, device)
    module._set_taken = lambda taken, device=None: _do("taken", taken, device)
    module._users = users
    return module  # type: ignore[no-any-return]


def trace(device: int, *, on: bool) -> list[tuple[int, int]]:
    """Begin to record (on), or end it and return what was allocated since: (number, bytes); -1 bytes: it was freed."""
    if on:
        _do("trace", 1, device)
        return []
    flat = torch.ops.fedtest.trace(device)
    _do("trace", 0, device)
    return list(zip(flat[::2], flat[1::2], strict=True))
