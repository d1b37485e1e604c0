"""Which devices a run may ask at all: by their labels and the tasks that their owners allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from edge_client.config.run_file import RunFile

__all__ = ["Obstacle", "obstacle"]


class Obstacle(NamedTuple):
    """Why a device cannot take part."""

    code: str
    detail: str


def obstacle(file: RunFile, *, labels: Mapping[str, str], tasks: Mapping[str, str]) -> Obstacle | None:
    """What keeps a device with these labels and tasks (name -> hash of its file) out of a run, or None."""
    for wanted in file.devices.where:
        key, _, value = wanted.partition("=")
        if labels.get(key) != value:
            has = f"{key}={labels[key]}" if key in labels else f"no label {key!r}"
            return Obstacle("label", f"the run wants {wanted}, the device has {has}")
    if file.task is None:
        return None
    name, expected = file.task.name, file.task.sha256
    if name not in tasks:
        return Obstacle("task_missing", f"its owner allows no task {name!r}; add it to tasks in its device.toml")
    if tasks[name] != expected:
        return Obstacle(
            "task_differs",
            f"task {name!r} is {tasks[name][:12]} on the device and {expected[:12]} in the run; copy the same file",
        )
    return None
