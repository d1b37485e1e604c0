"""Chunks of blobs and the files that stay open for them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from coordinator.fleet.chunk_reader import ChunkReader
from edge_client.transport.blobs import BlobStore
from edge_client.wire.chunks import parse_chunk


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_that_are_gone_are_not_held_open(tmp_path: Path) -> None:
    """Of ten models that were read four stay open; one that is removed is closed at once and not read any more."""
    blobs = BlobStore(tmp_path / "blobs", tmp_path / "tmp")
    reader = ChunkReader(blobs)
    before = _open_fds()
    names = []
    for number in range(10):
        data = bytes([number]) * 10
        names.append(hashlib.sha256(data).hexdigest())
        blobs.write(data, names[-1], point="test")
        chunk = reader.chunk(names[-1], 0)
        assert chunk is not None
        assert bytes(parse_chunk(chunk).body) == data
    assert _open_fds() == before + 4
    for name in names:
        blobs.remove(name)
        reader.forget(name)
    assert _open_fds() == before
    assert reader.chunk(names[-1], 0) is None
    reader.close()


def test_a_chunk_that_was_read_lately_is_not_read_again(tmp_path: Path) -> None:
    """Its file may even be gone: 8 MB of chunks stay in memory until the blob is forgotten."""
    blobs = BlobStore(tmp_path / "blobs", tmp_path / "tmp")
    reader, sha256 = ChunkReader(blobs), hashlib.sha256(b"model").hexdigest()
    blobs.write(b"model", sha256, point="test")
    chunk = reader.chunk(sha256, 0)
    blobs.remove(sha256)
    assert reader.chunk(sha256, 0) == chunk
    reader.forget(sha256)
    assert reader.chunk(sha256, 0) is None
