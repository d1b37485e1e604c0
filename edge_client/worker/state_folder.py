"""The files that a device keeps of a run, in `method-state/RUN`. No torch: the daemon reads and renames them, too.

received.json    the model that a worker last worked with; not synced, so it may be gone until the next round
next             what the method remembers after the assignment in hand, written by its worker
stored-LEASE     the same, once the coordinator has stored the update of that lease
current          the same, once that update went into a model: what the next worker begins with
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from edge_client.errors import PayloadError
from edge_client.records import Count, SliceText, Text, WorkOrder, from_map, to_map

__all__ = ["CURRENT", "NEXT", "STORED_PREFIX", "LastModel", "read_last_model", "write_last_model"]

NEXT, CURRENT = "next", "current"
STORED_PREFIX = "stored-"  # and the lease
_LAST_MODEL = "received.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastModel:
    """The model that a device last received in a run: with the method's state, it is the device's personal model."""

    run: Text
    round: Count
    slice: SliceText
    settings_sha256: Text
    model_sha256: Text


def write_last_model(order: WorkOrder, settings: Path, model: Path) -> None:
    """Remember the files of an assignment; as blobs of this device, they are named by their hashes."""
    last = LastModel(
        run=order.run,
        round=order.round,
        slice=order.slice,
        settings_sha256=settings.name,
        model_sha256=model.name,
    )
    folder = Path(order.method_state)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{_LAST_MODEL}.tmp"
    temporary.write_text(json.dumps(to_map(last)), encoding="utf-8")
    os.replace(temporary, folder / _LAST_MODEL)


def read_last_model(folder: Path) -> LastModel | None:
    """The last model of a run; None if there is none, or its file is damaged."""
    try:
        return from_map(LastModel, json.loads((folder / _LAST_MODEL).read_bytes()))
    except (OSError, ValueError, RecursionError, PayloadError):
        return None
