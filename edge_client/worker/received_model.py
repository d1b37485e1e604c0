"""Which model a device last worked with, in `method-state/RUN/received.json`: with the method's state it is its own.

received.json    written by workers, read for the device's owner; not synced: it may be gone until the next round
next             what the method keeps after the work in hand, written by its worker
stored-LEASE     the same, since the update of that lease was received
current          the same, since that update went into a model: what the next worker begins with
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from edge_client.errors import PayloadError
from edge_client.records import Count, SliceText, Text, WorkOrder, from_map, to_map

__all__ = ["STORED_STATE", "Received", "note", "read"]

STORED_STATE = "stored-"  # and the lease
_NAME = "received.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The run and the model as blobs of this device."""

    run: Text
    round: Count
    slice: SliceText
    settings_sha256: Text
    model_sha256: Text


def note(order: WorkOrder, settings: Path, model: Path) -> None:
    """Remember the blobs of an assignment; their names are their hashes."""
    received = Received(
        run=order.run,
        round=order.round,
        slice=order.slice,
        settings_sha256=settings.name,
        model_sha256=model.name,
    )
    folder = Path(order.method_state)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{_NAME}.tmp"
    temporary.write_text(json.dumps(to_map(received)), encoding="utf-8")
    os.replace(temporary, folder / _NAME)


def read(folder: Path) -> Received | None:
    """What a worker noted for a run; None if none did, or it makes no sense."""
    try:
        return from_map(Received, json.loads((folder / _NAME).read_bytes()))
    except (OSError, ValueError, RecursionError, PayloadError):
        return None
