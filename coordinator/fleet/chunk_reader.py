"""Chunks of blobs, read from a few open files; the newest ones stay in memory, because many devices ask for them."""

from __future__ import annotations

from collections import OrderedDict

from edge_client import durable
from edge_client.transport.blobs import BlobStore, Outgoing

__all__ = ["ChunkReader"]

_MAX_OPEN_FILES = 4  # the settings and the newest models
_MAX_CACHED_CHUNKS = 64  # 8 MB: devices of a round ask for the same ones, nearly at the same time


class ChunkReader:
    """Reads chunks by the blob's hash and their index."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._files: OrderedDict[str, Outgoing] = OrderedDict()
        self._cached: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def chunk(self, sha256: str, index: int) -> bytes | None:
        """A chunk as it travels; None of a blob that was removed meanwhile."""
        with durable.disk_errors(f"cannot read {self._blobs.path(sha256)}"):
            try:
                return self._chunk(sha256, index)
            except FileNotFoundError:
                return None

    def _chunk(self, sha256: str, index: int) -> bytes:
        chunk = self._cached.pop((sha256, index), None) or self._file(sha256).chunk(index)
        self._cached[sha256, index] = chunk
        if len(self._cached) > _MAX_CACHED_CHUNKS:
            self._cached.popitem(last=False)
        return chunk

    def _file(self, sha256: str) -> Outgoing:
        outgoing = self._files.get(sha256)
        if outgoing is None:
            path = self._blobs.path(sha256)
            outgoing = self._files[sha256] = Outgoing(path, sha256, path.stat().st_size)
            if len(self._files) > _MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(sha256)
        return outgoing

    def forget(self, sha256: str) -> None:
        """Close a blob's file and drop its chunks: its bytes belong to the disk again when nobody has it open."""
        outgoing = self._files.pop(sha256, None)
        if outgoing is not None:
            outgoing.close()
        for key in [key for key in self._cached if key[0] == sha256]:
            del self._cached[key]

    def close(self) -> None:
        """Close all files."""
        for outgoing in self._files.values():
            outgoing.close()
        self._files.clear()
        self._cached.clear()
