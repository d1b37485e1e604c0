"""The report of `edge-client profile` on this device, a recorded one, or one of the catalogue.

`to_json` has the same keys for all three. Does not cover: reading (`probe`, `catalogue`), the budget (`profile`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.config.quantities import format_bytes
from edge_client.device import gpus
from edge_client.device.catalogue import KnownDevice, load_known
from edge_client.device.cgroups import MemoryLimit
from edge_client.device.gpus import Accelerator, Nvml
from edge_client.device.probe import Swap, System, TorchBuild, find_torch, probe
from edge_client.device.profile import derive_budget, no_memory, usable_cores
from edge_client.records import to_map

__all__ = ["DeviceReport", "describe", "report_known_model", "report_system", "to_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """What a device is and may use; the fields are the keys of the JSON."""

    source: str  # this device | root DIR | profile NAME
    kind: str
    model: str
    machine: str = ""
    release: str = ""
    container: str = ""
    memory_bytes: int
    available_bytes: int
    gpu_memory: str  # none | unified | separate | unknown
    accelerators: tuple[Accelerator, ...] = ()
    bandwidth_gb_s: float | None = None
    cores: int
    cpu_quota: float | None = None
    memory_controller: str = "none"
    limits: tuple[MemoryLimit, ...] = ()
    swaps: tuple[Swap, ...] = ()
    torch: TorchBuild | None = None
    budget_bytes: int
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)  # of figures that were not measured


def report_system(root: Path, limit: int | None, *, nvml: Nvml | None = None) -> DeviceReport:
    """Report on the system below `root`; only the running system is asked through NVML, too.

    `limit` is `limits.memory` of device.toml.
    """
    here = os.path.realpath(root) == "/"
    system = probe(root, nvml=nvml or (gpus.ask_nvml if here else None))
    if limit is None and system.memory is None:
        raise no_memory(root, system.notes)
    budget = derive_budget(system.memory, system.groups.memory, limit)
    return DeviceReport(
        source="this device" if here else f"root {root}",
        kind=system.kind,
        model=system.model,
        machine=system.machine,
        release=system.release,
        container=system.container,
        memory_bytes=system.memory.total_bytes if system.memory else 0,
        available_bytes=system.memory.available_bytes if system.memory else 0,
        gpu_memory=_gpu_memory(system.accelerators),
        accelerators=system.accelerators,
        cores=usable_cores(system.cores, system.groups.cpu),
        cpu_quota=min((quota.cores for quota in system.groups.cpu), default=None),
        memory_controller=system.groups.memory_controller,
        limits=system.groups.memory,
        swaps=system.swaps,
        torch=find_torch() if here else None,
        budget_bytes=budget.num_bytes,
        reasons=(*budget.reasons, *_memory_reasons(system)),
        notes=(*system.notes, *_advice(system)),
    )


def report_known_model(name: str, limit: int | None) -> DeviceReport:
    """Report on a device model of the catalogue, or of a TOML file of the same form."""
    known = load_known(name)
    memory = known.typical_memory()
    budget = derive_budget(memory, (), limit)
    shared = ("the GPU uses the same memory: it is counted once",) if known.gpu_memory == "unified" else ()
    return DeviceReport(
        source=f"profile {name}",
        kind=known.kind,
        model=known.name,
        memory_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        gpu_memory=known.gpu_memory,
        accelerators=(Accelerator(name=known.accelerator, memory=known.gpu_memory),) if known.accelerator else (),
        bandwidth_gb_s=known.bandwidth,
        cores=known.cores,
        budget_bytes=budget.num_bytes,
        reasons=(*budget.reasons, *shared),
        notes=(*((known.note,) if known.note else ()), _measured(known)),
        sources=known.sources,
    )


def _measured(known: KnownDevice) -> str:
    if known.measured:
        return f"these figures were measured on such a device by {known.measured}"
    return "these figures were not measured on such a device by anybody who told us; their sources are below"


def _gpu_memory(accelerators: tuple[Accelerator, ...]) -> str:
    return accelerators[0].memory if accelerators else "none"


def _memory_reasons(system: System) -> Iterator[str]:
    if any(accelerator.memory == "unified" for accelerator in system.accelerators):
        yield "the GPU uses the same memory: it is counted once"
    if system.swaps:
        named = ", ".join(f"{swap.name} {format_bytes(swap.num_bytes)}" for swap in system.swaps)
        yield f"swap is never counted: {named}"


def _advice(system: System) -> Iterator[str]:
    if system.groups.memory_controller == "off":
        where = "/boot/firmware/cmdline.txt" if system.kind == "raspberry-pi" else "the kernel's command line"
        yield (
            "the kernel's memory controller is off: MemoryMax of systemd and memory limits of containers have no "
            f"effect; cgroup_enable=memory in {where} switches it on"
        )


def to_json(report: DeviceReport) -> dict[str, Any]:
    """Plain data with stable keys; unknown values are null."""
    limits = [{**to_map(limit), "headroom_bytes": limit.headroom_bytes} for limit in report.limits]
    return {**to_map(report), "limits": limits}


def describe(report: DeviceReport) -> str:
    """For people."""
    rows = list(_rows(report))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _rows(report: DeviceReport) -> Iterator[tuple[str, str]]:
    container = f" in a container ({report.container})" if report.container else ""
    kind = f"container ({report.container})" if report.kind == "container" else report.kind + container
    yield "device", f"{kind}; {report.source}"
    extra = [part for part in (report.machine, f"Jetson Linux {report.release}" if report.release else "") if part]
    yield "model", f"{report.model or 'not known'}{' (' + ', '.join(extra) + ')' if extra else ''}"
    yield "memory", _memory(report)
    yield from (("accelerator", _accelerator(accelerator)) for accelerator in report.accelerators)
    if not report.accelerators:
        yield "accelerator", "none found"
    quota = f" (a control group gives CPU time of {report.cpu_quota:g})" if report.cpu_quota is not None else ""
    yield "cores", f"{report.cores}{quota}"
    yield "limits", _controller(report)
    if report.source == "this device":
        yield "torch", _torch(report.torch)
    yield "budget", f"{format_bytes(report.budget_bytes)} for a worker process"
    for number, reason in enumerate(report.reasons):
        yield "because" if number == 0 else "", reason
    yield from (("note", note) for note in report.notes)
    yield from (("source", f"{figure}: {source}") for figure, source in report.sources.items())


def _memory(report: DeviceReport) -> str:
    if not report.memory_bytes:
        return "not known"
    speed = f", {report.bandwidth_gb_s:g} GB/s" if report.bandwidth_gb_s is not None else ""
    return f"{format_bytes(report.memory_bytes)}, {format_bytes(report.available_bytes)} available{speed}"


def _accelerator(accelerator: Accelerator) -> str:
    words = {"unified": "uses the system's memory", "unknown": "its memory is not known"}
    text = words.get(accelerator.memory, "memory of its own")
    if accelerator.total_bytes is not None and accelerator.free_bytes is not None:
        free, total = format_bytes(accelerator.free_bytes), format_bytes(accelerator.total_bytes)
        text = f"memory of its own: {total}, {free} free"
    return f"{accelerator.name}; {text}"


def _controller(report: DeviceReport) -> str:
    if report.limits:
        tightest = min(report.limits, key=lambda limit: limit.headroom_bytes)
        return f"{format_bytes(tightest.limit_bytes)} (cgroup v{tightest.version} {tightest.group})"
    words = {"off": "none: the memory controller is off", "hidden": "not visible from here"}
    return words.get(report.memory_controller, "none")


def _torch(build: TorchBuild | None) -> str:
    if build is None:
        return "not installed"
    return f"{build.version}, {'built for CUDA ' + build.cuda if build.cuda else 'built without CUDA'}"
