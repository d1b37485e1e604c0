"""fedfit's SDK: everything a device needs to take part in a federation, and the maths that the coordinator shares.

`Task`, `image_folder`, `csv` and `npz` are for task files; they are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_client.data.sets import csv, image_folder, npz
    from edge_client.task.task import Task

__all__ = ["Task", "__version__", "csv", "image_folder", "npz"]

__version__ = "0.1.0"

_HOMES = {
    "Task": "edge_client.task.task",
    "csv": "edge_client.data.sets",
    "image_folder": "edge_client.data.sets",
    "npz": "edge_client.data.sets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge_client' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
