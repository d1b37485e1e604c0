"""What a method remembers on this device from round to round: its tensors, in the run's state folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from edge_client import durable, faults
from edge_client.device.accelerator import CPU, Accelerator
from edge_client.methods.slices import WHOLE_MODEL
from edge_client.wire.container import read_header
from edge_client.wire.tensors import codec_for, write_container
from edge_client.worker.state_folder import CURRENT, NEXT, STORED_PREFIX
from edge_client.worker.stored_tensors import StoredTensors

__all__ = ["read_state", "write_state"]


def read_state(folder: Path, slice_name: str = WHOLE_MODEL, device: Accelerator = CPU) -> Mapping[str, Tensor]:
    """The state after the newest of this device's rounds that is not known not to count; empty for another slice.

    Before a worker begins, its assignment tells which of the stored updates counted (`client.method_state`).
    """
    stored = sorted(folder.glob(f"{STORED_PREFIX}*"), key=lambda path: path.stat().st_mtime_ns)
    path = stored[-1] if stored else folder / CURRENT
    if path.exists() and read_header(path).meta.get("slice", WHOLE_MODEL) != slice_name:
        return {}
    return StoredTensors(path, device=device)


def write_state(folder: Path, state: Mapping[str, Tensor], slice_name: str = WHOLE_MODEL) -> None:
    """Write `state` as `next`; it becomes `current` if its update counts, or a repeated round would apply it twice."""
    (folder / NEXT).unlink(missing_ok=True)  # of an assignment that was given up
    if not state:
        return
    folder.mkdir(parents=True, exist_ok=True)
    table = [(name, codec_for(tensor, "fp32"), tuple(tensor.shape)) for name, tensor in state.items()]
    temporary = folder / ".next.tmp"
    try:
        faults.point("worker.state.write")
        write_container(temporary, {"slice": slice_name}, table, state.values())
        durable.publish(temporary, folder / NEXT, point="worker.state")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
