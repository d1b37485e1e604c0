"""Where a device's transfers store the parts of assignments: for a daemon on the device's own disk.

See also `edge_client.transport.blobs`; the devices of a simulation share one (`coordinator.simulation.shared_parts`).
"""

from __future__ import annotations

from typing import Protocol

from edge_client.records import PartRef
from edge_client.transport.blobs import BlobStore, Incoming
from edge_client.wire.chunks import Chunk
from edge_client.wire.flow_control import PULL_WINDOW_BYTES
from edge_client.wire.reassembly import Reassembly

__all__ = ["IncomingPart", "PartStore", "PartsOnDisk"]


class IncomingPart(Protocol):
    """A part of which some chunks are still missing."""

    chunks: Reassembly

    def add(self, chunk: Chunk, now: float) -> bool:
        """Store a chunk; False if it was here already. Raises `PayloadError` if it does not belong here."""

    def finish(self) -> object:
        """Check the hash of the whole part and make it available; a wrong hash raises `PayloadError`."""

    def close(self) -> None:
        """Close its files; the chunks that are here stay."""


class PartStore(Protocol):
    """A place where parts are stored."""

    def has(self, sha256: str) -> bool:
        """Whether the part is here and its bytes are right."""

    def receive(self, part: PartRef, *, point: str) -> IncomingPart:
        """Begin to receive a part, or go on with it; `point` names its fault points."""


class PartsOnDisk:
    """The parts of one device, in a blob store of its own; nothing is synced, because it can be fetched again."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    def has(self, sha256: str) -> bool:
        """Whether the part is here and its bytes are right; they are read once per process."""
        return self._blobs.verified(sha256)

    def receive(self, part: PartRef, *, point: str) -> Incoming:
        """Begin to receive a part, or go on with the chunks that arrived before a restart."""
        return Incoming(
            self._blobs,
            part.sha256,
            sha256=part.sha256,
            length=part.length,
            max_window_bytes=PULL_WINDOW_BYTES,
            point=point,
            sync=False,
        )
