"""Where training happens: on the CPU, or on an accelerator with memory that torch allocates for itself.

This is the only module that knows CUDA. Everybody else asks it: to choose a device, to move to it, to seed it, to read,
reset and limit its memory, to wait for it. Most backends of torch show themselves as a module with the names of
`torch.cuda` (ROCm is that module, Intel's is `torch.xpu`, an extension registers one under the name of its device), so
one class serves them all; the CPU has another, for which most questions are empty.

    separate   a GPU with memory of its own: the host's memory is a second budget
    unified    a GPU that uses the host's memory (Jetson): one budget for both

Covers: torch's side of a device. Does not cover: which GPUs a system has (`gpus`), what fits (`planning`), the GPUs of
Apple, whose backend does not count its peak. Imports torch.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from edge_client.config.quantities import format_bytes
from edge_client.device.gpus import User, ask_users, nvmap_bytes
from edge_client.device.probe import native_bf16, read_memory
from edge_client.device.tree import Tree
from edge_client.errors import InputError, is_out_of_memory

__all__ = [
    "CPU",
    "Accelerator",
    "Choice",
    "choose",
    "count",
    "device_of",
    "of",
    "same_randomness",
    "wrong_architecture",
]

_Movable = TypeVar("_Movable", bound=Tensor | nn.Module)
States = tuple[Tensor, ...]  # of random generators

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES_DEVICES = hasattr(torch, "get_autocast_dtype")  # torch 2.4: before it, each type of device had its own functions
_BF16_CAPABILITY = (8, 0)  # of an NVIDIA GPU; older ones emulate it
_BACKENDS = ("cuda", "xpu")  # in this order, with `auto`; others are taken by name only
# What a context with its libraries takes before it was measured: bounds for a discrete GPU and for a Jetson.
_CONTEXT_BYTES = {"separate": 1_600_000_000, "unified": 600_000_000}


class Accelerator(Protocol):
    """What the project asks of the device that it trains on."""

    kind: str  # cpu, cuda, xpu, or the name of an extension
    memory: str  # host | separate | unified
    device: torch.device

    def move(self, what: _Movable) -> _Movable:
        """The tensor or module there; on the CPU the same object. A moved module may have other parameters."""

    def random_states(self) -> States:
        """Of the generators that a model may draw from: the CPU's and the device's; `torch.manual_seed` seeds all."""

    def set_random_states(self, states: States) -> None:
        """Undo what was drawn since."""

    def users(self) -> Sequence[User]:
        """Who holds memory of the device, where that is known."""

    def synchronise(self) -> None:
        """Wait until everything that was asked for is done."""

    def reserved_bytes(self) -> int:
        """Memory that torch has taken on the device, cached or used; 0 on the CPU, whose memory the kernel counts."""

    def peak_reserved_bytes(self) -> int:
        """The largest since the peak was reset."""

    def reset_peak(self) -> None:
        """Count the peak from now on."""

    def limit(self, num_bytes: int | None) -> None:
        """Refuse to reserve more than this; None: as much as there is. On the CPU the `guard` does it."""

    def free(self) -> None:
        """Give cached memory back: drop what is in circles, then every segment that nothing uses."""

    def memory_bytes(self) -> tuple[int, int]:
        """Free and in all; of a unified device, the host's available memory. Zeros on the CPU."""

    def take(self) -> None:
        """Make the context and run a product; raises `InputError`, in one line, where the device cannot be used."""

    def context_bytes(self) -> int:
        """What the context and its libraries take beside what is reserved; a bound where it cannot be measured.

        0 on the CPU.
        """

    def use_deterministic_kernels(self, wanted: bool) -> None:
        """Choose kernels that give the same bits every time, and products of float32 in full; or the fastest ones."""

    def dtypes(self) -> tuple[str, ...]:
        """The types of activations that are worth it here."""

    def autocast(self, dtype: str) -> AbstractContextManager[object]:
        """Around forward passes, not around backward: compute in `dtype`; fp32 as it is."""

    def autocasts(self) -> bool:
        """Whether functions choose the type that they compute in."""

    def autocast_again(self) -> AbstractContextManager[object]:
        """The present state of autocasting, for a second pass that is made outside of the first one's context."""

    def fingerprint(self) -> str:
        """Device and libraries: equal ones allocate alike, and give equal bits."""


class _Cpu:
    kind, memory = "cpu", "host"
    device = torch.device("cpu")

    def move(self, what: _Movable) -> _Movable:
        return what

    def random_states(self) -> States:
        return (torch.get_rng_state(),)

    def set_random_states(self, states: States) -> None:
        torch.set_rng_state(states[0])

    def users(self) -> Sequence[User]:
        return ()

    def synchronise(self) -> None:
        return

    def reserved_bytes(self) -> int:
        return 0

    def peak_reserved_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        return

    def limit(self, num_bytes: int | None) -> None:
        return

    def free(self) -> None:
        return

    def memory_bytes(self) -> tuple[int, int]:
        return 0, 0

    def take(self) -> None:
        return

    def context_bytes(self) -> int:
        return 0

    def use_deterministic_kernels(self, wanted: bool) -> None:
        return

    def dtypes(self) -> tuple[str, ...]:
        return ("fp32", "bf16") if native_bf16() else ("fp32",)

    def autocast(self, dtype: str) -> AbstractContextManager[object]:
        return _autocast("cpu", dtype, known=("fp32", "bf16"))

    def autocasts(self) -> bool:
        return torch.is_autocast_enabled("cpu") if _NAMES_DEVICES else torch.is_autocast_cpu_enabled()

    def autocast_again(self) -> AbstractContextManager[object]:
        dtype = torch.get_autocast_dtype("cpu") if _NAMES_DEVICES else torch.get_autocast_cpu_dtype()
        return torch.autocast("cpu", dtype=dtype, enabled=self.autocasts(), cache_enabled=False)

    def fingerprint(self) -> str:
        return "cpu"


CPU: Accelerator = _Cpu()


class _WithModule:
    """A device whose module in torch has the names of `torch.cuda`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = device.type
        self._module: Any = getattr(torch, device.type)
        self._index = device.index or 0
        self.memory = "unified" if self._is_integrated() else "separate"
        self._taken_before: int | None = None  # of the device, by all programs, before this process had a context

    def _is_integrated(self) -> bool:
        """Whether it has no memory of its own; an older torch does not know, the name of a Jetson's kernel does."""
        properties = self._properties()
        fallback = self.kind == "cuda" and os.uname().release.endswith("-tegra")
        return bool(getattr(properties, "is_integrated", fallback))

    def _properties(self) -> Any:
        ask = getattr(self._module, "get_device_properties", None)
        return ask(self._index) if ask is not None else None

    def move(self, what: _Movable) -> _Movable:
        moved: _Movable = what.to(self.device)  # type: ignore[assignment]
        return moved

    def random_states(self) -> States:
        return torch.get_rng_state(), self._module.get_rng_state(self._index)

    def set_random_states(self, states: States) -> None:
        torch.set_rng_state(states[0])
        self._module.set_rng_state(states[1], self._index)

    def synchronise(self) -> None:
        self._module.synchronize(self._index)

    def reserved_bytes(self) -> int:
        return int(self._module.memory_reserved(self._index))

    def peak_reserved_bytes(self) -> int:
        return int(self._module.max_memory_reserved(self._index))

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self._index)

    def limit(self, num_bytes: int | None) -> None:
        total = int(self._module.mem_get_info(self._index)[1])
        # torch multiplies the fraction by the total again and cuts the rest off: one byte more keeps the whole budget
        fraction = 1.0 if num_bytes is None else min(1.0, (num_bytes + 1) / total)
        self._module.set_per_process_memory_fraction(fraction, self._index)

    def free(self) -> None:
        gc.collect()
        self._module.empty_cache()

    def memory_bytes(self) -> tuple[int, int]:
        free, total = (int(number) for number in self._module.mem_get_info(self._index))
        if self.memory == "unified":  # the driver counts the page cache as used
            host = read_memory(Tree())
            free = min(total, host.available_bytes) if host is not None else free
        return free, total

    def take(self) -> None:
        if self._taken_before is None:
            self._taken_before = self._taken_bytes()
        if self.kind == "cuda" and torch.version.hip is None:
            wrong = wrong_architecture(
                self._module.get_arch_list(), self._module.get_device_capability(self._index), memory=self.memory
            )
            if wrong:
                raise InputError(f"{self.kind}:{self._index} cannot be used: {wrong}")
        try:
            ones = torch.ones(8, 8, device=self.device)
            float((ones @ ones).sum())
        except RuntimeError as error:
            raise InputError(self._why_not(error)) from error

    def _why_not(self, error: RuntimeError) -> str:
        first = str(error).strip().splitlines()[0].rstrip(".")
        name = f"{self.kind}:{self._index}"
        if not is_out_of_memory(error):
            if "ermission denied" in first:
                return f"{name} cannot be used: {first}; add the user to the groups video and render"
            return f"{name} cannot be used: {first}"
        users = ", ".join(str(user) for user in self.users() if user.pid != os.getpid())
        needed = format_bytes(_CONTEXT_BYTES[self.memory] if self.kind in _BACKENDS else 0)
        taken = f"; {users}" if users else "; who takes its memory is not known"
        return f"{name} has too little free memory for a context, which needs up to {needed}{taken} ({first})"

    def users(self) -> Sequence[User]:
        """Who holds memory of the device, where that is known; the process ids of a container are its own."""
        ask = getattr(self._module, "_users", None)
        if ask is not None:
            return [User(pid=pid, num_bytes=num_bytes) for pid, num_bytes in sorted(ask(self._index).items())]
        return ask_users(self._index) if self.kind == "cuda" else ()

    def _taken_bytes(self) -> int | None:
        """Of the device by all programs, without making a context; None where nobody says."""
        if self.memory == "unified" and self.kind == "cuda":
            return nvmap_bytes(Tree())
        ask = getattr(self._module, "device_memory_used", None)
        try:
            return int(ask(self._index)) if ask is not None else None
        except (ImportError, RuntimeError, OSError):  # it needs nvidia-ml-py, and a driver that answers
            return None

    def context_bytes(self) -> int:
        taken = self._taken_bytes()
        if self._taken_before is None or taken is None:
            return _CONTEXT_BYTES[self.memory] if self.kind in _BACKENDS else 0
        return max(0, taken - self._taken_before - self.reserved_bytes())

    def use_deterministic_kernels(self, wanted: bool) -> None:
        if self.kind == "cuda":
            torch.use_deterministic_algorithms(wanted, warn_only=True)
            torch.backends.cudnn.deterministic = wanted
            torch.backends.cudnn.benchmark = False  # it would try algorithms with any workspace that is free
            torch.backends.cuda.matmul.allow_tf32 = not wanted
            torch.backends.cudnn.allow_tf32 = not wanted

    def dtypes(self) -> tuple[str, ...]:
        if self.kind == "cuda" and self._module.get_device_capability(self._index) < _BF16_CAPABILITY:
            return ("fp32", "fp16")
        return ("fp32", "bf16", "fp16")

    def autocast(self, dtype: str) -> AbstractContextManager[object]:
        return _autocast(self.kind, dtype, known=("fp32", "bf16", "fp16"))

    def autocasts(self) -> bool:
        if _NAMES_DEVICES:
            return torch.is_autocast_enabled(self.kind)
        return bool(torch.is_autocast_enabled() if self.kind == "cuda" else self._module.is_autocast_enabled())

    def autocast_again(self) -> AbstractContextManager[object]:
        if _NAMES_DEVICES:
            dtype = torch.get_autocast_dtype(self.kind)
        else:
            dtype = torch.get_autocast_gpu_dtype() if self.kind == "cuda" else self._module.get_autocast_dtype()
        return torch.autocast(self.kind, dtype=dtype, enabled=self.autocasts(), cache_enabled=False)

    def fingerprint(self) -> str:
        parts = [self.kind, str(getattr(self._properties(), "name", self.kind))]
        if self.kind == "cuda":
            parts.append("sm_{}{}".format(*self._module.get_device_capability(self._index)))
            parts.append(f"CUDA {torch.version.cuda or torch.version.hip}")
            parts.append(f"cuDNN {torch.backends.cudnn.version()}")  # type: ignore[no-untyped-call]
        return ", ".join([*parts, f"torch {torch.__version__}"])


def wrong_architecture(built_for: Sequence[str], capability: tuple[int, int], *, memory: str) -> str:
    """Why a build of torch has no kernels for an NVIDIA GPU; empty if it has, or does not say.

    Code for a GPU of the same generation serves discrete ones, never a Jetson's; `compute_` is translated for all.
    """
    major, minor = capability
    for name in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
        if match is None:
            return ""
        built = int(match[2]), int(match[3])
        is_same = built == capability
        is_older = built <= capability if match[1] == "compute" else built[0] == major and built[1] <= minor
        if is_same or (is_older and (match[1] == "compute" or memory == "separate")):
            return ""
    if not built_for:
        return ""
    return f"this torch was built for {', '.join(built_for)}; this GPU is sm_{major}{minor}: install NVIDIA's"


def _autocast(kind: str, dtype: str, *, known: Sequence[str]) -> AbstractContextManager[object]:
    if dtype not in known:
        raise ValueError(f"expected a type of {', '.join(known)}, got {dtype!r}")
    # the cache would hold a copy of every weight, and one that was made without gradient would be used with it
    return nullcontext() if dtype == "fp32" else torch.autocast(kind, _DTYPES[dtype], cache_enabled=False)


@functools.cache
def of(device: torch.device) -> Accelerator:
    """The device that a tensor lies on; tensors without values (meta) are the host's."""
    return CPU if device.type in ("cpu", "meta") else _WithModule(device)


def device_of(model: nn.Module) -> Accelerator:
    """The device that a model lies on, which is one."""
    tensor: Tensor | None = next(itertools.chain(model.parameters(), model.buffers()), None)
    return of(tensor.device) if tensor is not None else CPU


@contextmanager
def same_randomness(device: Accelerator) -> Iterator[None]:
    """Inside, generators may be seeded and drawn from; afterwards they go on as if nothing had happened."""
    states = device.random_states()
    try:
        yield
    finally:
        device.set_random_states(states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a device's owner gets for `limits.accelerator`."""

    accelerator: Accelerator
    reason: str = ""  # why it is the CPU, although the owner would have taken another


def choose(wish: str) -> Choice:
    """The device for `auto`, `none` or a name such as `cuda:0`; raises `InputError` for a named one that is not there.

    `auto` falls back to the CPU, with the reason; a named device never does.
    """
    if wish == "none":
        return Choice(accelerator=CPU)
    if wish != "auto":
        return Choice(accelerator=_named(wish))
    reasons = []
    for kind in _BACKENDS:
        try:
            return Choice(accelerator=_named(kind))
        except InputError as error:
            reasons.append(str(error))
    return Choice(accelerator=CPU, reason=reasons[0])


def count(kind: str) -> int:
    """How many devices of a kind there are; 1 for the CPU."""
    module: Any = getattr(torch, kind, None)
    return int(module.device_count()) if kind != CPU.kind and hasattr(module, "device_count") else 1


def _named(wish: str) -> Accelerator:
    match = re.fullmatch(r"([a-z]{1,16})(?::(\d{1,3}))?", wish)
    if match is None:
        raise InputError(f"limits.accelerator: expected auto, none or a name such as cuda:0, got {wish!r}")
    kind, index = match[1], int(match[2] or 0)
    module = getattr(torch, kind, None)
    if not hasattr(module, "max_memory_reserved"):
        raise InputError(f"limits.accelerator: torch {torch.__version__} has no devices of the kind {kind!r}")
    count = _count(kind, module)
    if index >= count:
        names = ", ".join(f"{kind}:{number}" for number in range(count))
        raise InputError(f"limits.accelerator: this device has {count} of the kind {kind!r} ({names}), not {wish!r}")
    return of(torch.device(kind, index))


def _count(kind: str, module: Any) -> int:
    """How many there are; raises `InputError` with what torch says where there is none."""
    if module.is_available():
        return int(module.device_count())
    try:
        module.init()
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise InputError(f"no {kind!r} device can be used: {reason}") from error
    raise InputError(f"no {kind!r} device can be used, and torch does not say why")
