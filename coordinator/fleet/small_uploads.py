"""Updates that are small enough for one message: their bytes stay in memory until they are whole, and need no sync.

The store keeps the bytes of such an update in a row, in the same transaction as the update's own row. Its file is for
the aggregator alone, which reads files; a power cut may take it, and the next start writes it again from the row.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from edge_client.errors import PayloadError
from edge_client.transport.blobs import BlobStore
from edge_client.wire.chunks import Chunk
from edge_client.wire.reassembly import Reassembly

__all__ = ["SMALL_UPDATE_BYTES", "SmallIncoming", "write_small"]

SMALL_UPDATE_BYTES = 65_536  # at most a chunk


def write_small(blobs: BlobStore, body: bytes, sha256: str) -> Path:
    """Write the file of an update whose bytes are in a row, or will be before anybody hears of it."""
    return blobs.write(body, sha256, point="small-update", sync=False)


class SmallIncoming:
    """One small update on its way in, as `edge_client.transport.blobs.Incoming` is for larger ones."""

    def __init__(self, blobs: BlobStore, *, sha256: str, length: int, max_window_bytes: int) -> None:
        self._blobs = blobs
        self.chunks = Reassembly(sha256=sha256, length=length, max_window_bytes=max_window_bytes)
        self.num_mismatches = 0
        self._body = b""

    def add(self, chunk: Chunk, now: float) -> bool:
        """Take the chunk; False if it was here already. Raises `PayloadError` if it does not belong here."""
        if self.chunks.accept(chunk, now) is None:
            return False
        self._body = bytes(chunk.body)
        return True

    def finish(self) -> Path:
        """Check the hash and write the file; a wrong hash starts the update again and raises `PayloadError`."""
        if hashlib.sha256(self._body).hexdigest() != self.chunks.sha256:
            self.num_mismatches += 1
            self.chunks.restart()
            raise PayloadError("hash", f"what arrived as {self.chunks.sha256[:12]} has another hash")
        return write_small(self._blobs, self._body, self.chunks.sha256)

    def close(self) -> None:
        """There is nothing to close; an update that did not arrive is sent again."""
