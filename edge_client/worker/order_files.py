"""An assignment as its process finds it: the order, the files that it names, the run, and the owner's device file.

Covers: reading them. Does not cover: what follows from them (`run_setup`, `device_data`); nothing is loaded yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.config.device_file import DeviceFile
from edge_client.config.run_file import RunFile
from edge_client.data.input_sums import SUMS_ROUND
from edge_client.errors import MachineError, PayloadError
from edge_client.knowledge.schema import KNOWLEDGE_PART, PUBLIC_PART
from edge_client.methods.slices import WHOLE_MODEL
from edge_client.records import WorkOrder, from_map
from edge_client.worker.privacy import Gate, Ledger
from edge_client.worker.process_cache import ProcessCache

__all__ = ["Assignment", "knowledge_paths", "model_path", "part_path", "read_assignment", "read_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The order and what its small files say; model and knowledge stay in theirs."""

    order: WorkOrder
    workdir: Path
    run: RunFile
    settings: Mapping[str, object]  # the run as it was sent, with what travels beside it, such as cost rows
    device: DeviceFile
    gate: Gate

    @property
    def only_evaluates(self) -> bool:
        """Whether the received model is tested and not trained; a dry run does neither."""
        return self.order.evaluate and not self.order.train

    @property
    def only_sums(self) -> bool:
        """Whether only the sums of this device's inputs are asked for."""
        return self.order.round == SUMS_ROUND and not self.order.train and not self.order.evaluate


def read_assignment(order: WorkOrder, workdir: Path, cache: ProcessCache) -> Assignment:
    """Read the order's small files; raises `MachineError` or `PayloadError`."""
    path = part_path(order, "run")
    run, settings = cache.once("run", str(path), lambda: _read_run(path))
    device: DeviceFile = from_map(DeviceFile, order.device_file, where="device file")
    gate = Gate(share=device.share, ledger=Ledger(Path(order.ledger)))
    return Assignment(order=order, workdir=workdir, run=run, settings=settings, device=device, gate=gate)


def part_path(order: WorkOrder, key: str) -> Path:
    """Where a part of the assignment lies; raises `PayloadError` if it did not come."""
    if key not in order.parts:
        raise PayloadError("malformed", f"the assignment has no part {key!r}, only {', '.join(order.parts)}")
    return Path(order.parts[key])


def model_path(order: WorkOrder) -> Path:
    """The received model, or the slice of it that this device trains."""
    return part_path(order, "model" if order.slice == WHOLE_MODEL else f"slice:{order.slice}")


def knowledge_paths(order: WorkOrder) -> list[Path]:
    """The received knowledge; empty for methods that share none."""
    parts = order.parts.items()
    return [Path(path) for key, path in parts if key == PUBLIC_PART or key.startswith(KNOWLEDGE_PART)]


def _read_run(path: Path) -> tuple[RunFile, Mapping[str, object]]:
    settings = read_json(path)
    return from_map(RunFile, settings, where="run"), settings


def read_json(path: Path) -> Any:
    """The plain data of a file; raises `MachineError` or `PayloadError`."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise PayloadError("malformed", f"{path.name} is not JSON: {error}") from error
