"""Blobs on disk, named by their SHA-256, and blobs on their way in.

A blob that has its name is whole and right: it got the name after its hash was checked and its bytes were synced. A
device does not sync what it can fetch again; after a power cut its blobs may be anything, so it asks `verified`. What
is still arriving lies in `tmp/` as `NAME.part` with one byte per chunk in `NAME.map`, and goes on after a restart; NAME
is the hash, or a lease, because two devices may send the same bytes. The map is not synced: if a power cut makes it
lie, the hash of the whole finds out and the transfer begins again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from edge_client import durable, faults
from edge_client.errors import PayloadError
from edge_client.wire.chunks import CHUNK_BYTES, Chunk, make_chunk, transfer_id
from edge_client.wire.reassembly import Reassembly

__all__ = ["BlobStore", "Incoming", "Outgoing"]

_HASH_PIECE = 1 << 20
_SYNC_CHUNKS = 34  # 4 MB, after which the system begins to write them


class BlobStore:
    """A folder of blobs and the folder of its unfinished ones; both on one file system."""

    def __init__(self, root: Path, temporary: Path) -> None:
        self._root = root
        self._temporary = temporary
        self._verified: set[str] = set()  # in this process
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, sha256: str) -> Path:
        """Where the blob is, or would be."""
        return self._root / sha256[:2] / sha256

    def temporary_path(self, name: str) -> Path:
        """A place for a file that will become a blob."""
        return self._temporary / name

    def has(self, sha256: str) -> bool:
        """Whether the complete blob is here."""
        return self.path(sha256).exists()

    def verified(self, sha256: str) -> bool:
        """Whether the blob is here and its bytes are right, read once per process; a wrong one is removed."""
        if sha256 in self._verified or not self.has(sha256):
            return self.has(sha256)
        with durable.disk_errors(f"cannot read {self.path(sha256)}"):
            actual = durable.sha256_file(self.path(sha256))
        if actual != sha256:
            self.remove(sha256)
            return False
        self._verified.add(sha256)
        return True

    def adopt(self, finished: Path, sha256: str, *, point: str, sync: bool = True) -> Path:
        """Name a finished temporary file, whose hash the caller knows; with `sync` durable when this returns."""
        final = self.path(sha256)
        with durable.disk_errors(f"cannot store {final}"):
            self._make_folders([final], sync=sync)
            durable.publish(finished, final, point=point, sync=sync)
        self._verified.add(sha256)
        return final

    def adopt_all(self, finished: Mapping[str, Path], *, point: str) -> None:
        """`adopt`, durably, several temporary files by their hashes: each folder is synced once for all of them."""
        final = {sha256: self.path(sha256) for sha256 in finished}
        with durable.disk_errors(f"cannot store {len(final)} files in {self._root}"):
            self._make_folders(final.values(), sync=True)
            durable.publish_all([(path, final[sha256]) for sha256, path in finished.items()], point=point)
        self._verified.update(finished)

    def _make_folders(self, blobs: Iterable[Path], *, sync: bool) -> None:
        missing = [folder for folder in dict.fromkeys(blob.parent for blob in blobs) if not folder.exists()]
        for folder in missing:
            folder.mkdir(mode=0o700, exist_ok=True)
        if missing and sync:
            durable.sync_dir(self._root)

    def write(self, data: bytes, sha256: str, *, point: str, sync: bool = True) -> Path:
        """A small blob from memory; without `sync` its bytes must be somewhere else, too."""
        temporary = self.temporary_path(f"{sha256}.new")
        with durable.disk_errors(f"cannot write {temporary}"):
            faults.point(f"{point}.write")
            temporary.write_bytes(data)
        return self.adopt(temporary, sha256, point=point, sync=sync)

    def remove(self, sha256: str) -> None:
        """Forget a blob."""
        with durable.disk_errors(f"cannot remove {self.path(sha256)}"):
            self.path(sha256).unlink(missing_ok=True)
        self._verified.discard(sha256)

    def discard(self, name: str) -> None:
        """Forget what has arrived under a temporary name."""
        for suffix in ("part", "map"):
            self.temporary_path(f"{name}.{suffix}").unlink(missing_ok=True)

    def arrived_bytes(self, name: str) -> int:
        """How much of the disk an unfinished file takes."""
        with contextlib.suppress(FileNotFoundError):
            return 512 * self.temporary_path(f"{name}.part").stat().st_blocks  # a missing chunk takes nothing
        return 0

    def names(self) -> Iterator[str]:
        """All blobs that are here."""
        for folder in self._root.iterdir():
            if folder.is_dir():
                yield from (entry.name for entry in folder.iterdir() if len(entry.name) == 64)

    def keep_only(self, wanted: set[str], unfinished: set[str]) -> None:
        """Remove all other blobs and unfinished files; only while nothing is being written."""
        with durable.disk_errors(f"cannot clean up {self._root}"):
            for name in [name for name in self.names() if name not in wanted]:
                self.remove(name)
            for entry in list(self._temporary.iterdir()):
                if entry.name.partition(".")[0] not in unfinished:
                    entry.unlink(missing_ok=True)


class Incoming:
    """One blob on its way in: chunks are written where they belong, in any order, each once."""

    def __init__(
        self,
        store: BlobStore,
        name: str,
        *,
        sha256: str,
        length: int,
        max_window_bytes: int,
        point: str,
        sync: bool = True,
    ) -> None:
        """`sync` as `BlobStore.adopt`."""
        self._store = store
        self._point = point
        self._sync = sync
        self.part = store.temporary_path(f"{name}.part")
        self._map = store.temporary_path(f"{name}.map")
        have = self._map.read_bytes() if self._map.exists() and self.part.exists() else b""
        self.chunks = Reassembly(sha256=sha256, length=length, max_window_bytes=max_window_bytes, have=have)
        with contextlib.ExitStack() as opened:
            self._part_fd = self._opened(self.part, opened)
            self._map_fd = self._opened(self._map, opened)
            if len(have) != self.chunks.num_chunks:  # of another blob, or of a part that is gone: it says nothing here
                os.ftruncate(self._map_fd, 0)
            os.ftruncate(self._map_fd, self.chunks.num_chunks)
            opened.pop_all()
        self._open = True
        self.num_mismatches = 0
        self._begin_hash()

    @staticmethod
    def _opened(path: Path, opened: contextlib.ExitStack) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        opened.callback(os.close, fd)
        return fd

    def _begin_hash(self) -> None:
        self._digest = hashlib.sha256()
        self._num_hashed = 0  # leading chunks: hashed as they come, while they are in the processor's cache
        self._num_syncing = 0  # leading chunks that the system has begun to write to the disk

    def add(self, chunk: Chunk, now: float) -> bool:
        """Write a chunk; False if it was here already. Raises `PayloadError` if it does not belong here."""
        offset = self.chunks.accept(chunk, now)
        if offset is None:
            return False
        try:
            faults.point(f"{self._point}.chunk")
            _write_all(self._part_fd, chunk.body, offset)
            os.pwrite(self._map_fd, b"\1", chunk.index)
        except OSError:
            self.chunks.forget(chunk.index)
            raise
        if chunk.index == self._num_hashed:
            self._digest.update(chunk.body)
            self._num_hashed += 1
            while self.chunks.has(self._num_hashed):  # those that overtook it
                self._digest.update(os.pread(self._part_fd, CHUNK_BYTES, self._num_hashed * CHUNK_BYTES))
                self._num_hashed += 1
            self._begin_sync()
        return True

    def _begin_sync(self) -> None:
        """What has come is written to the disk while the rest comes."""
        num_chunks = self._num_hashed - self._num_syncing
        if self._sync and num_chunks >= _SYNC_CHUNKS:
            durable.begin_sync(self._part_fd, self._num_syncing * CHUNK_BYTES, num_chunks * CHUNK_BYTES)
            self._num_syncing = self._num_hashed

    def finish(self) -> Path:
        """Check the hash and give the blob its name; a wrong hash starts it again and raises `PayloadError`."""
        self.check()
        path = self._store.adopt(self.part, self.chunks.sha256, point=self._point, sync=self._sync)
        self.discard_map()
        return path

    def check(self) -> None:
        """Look whether the bytes that came have their hash; otherwise start again and raise `PayloadError`."""
        os.ftruncate(self._part_fd, self.chunks.length)
        if self._hash_rest() != self.chunks.sha256:
            self.num_mismatches += 1
            self._begin_hash()
            self.chunks.restart()
            os.pwrite(self._map_fd, self.chunks.bitmap(), 0)
            raise PayloadError("hash", f"what arrived as {self.chunks.sha256[:12]} has another hash")

    def discard_map(self) -> None:
        """The part has become a blob: nobody needs to know its chunks any more."""
        self._map.unlink(missing_ok=True)

    def _hash_rest(self) -> str:
        """The hash of the whole blob; reads the chunks that were not hashed on arrival."""
        offset = self._num_hashed * CHUNK_BYTES
        while piece := os.pread(self._part_fd, _HASH_PIECE, offset):
            self._digest.update(piece)
            offset += len(piece)
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the files; chunks that have arrived stay for a later `Incoming`. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        for fd in (self._part_fd, self._map_fd):
            os.close(fd)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the data: a disk that is nearly full writes a part of it without an error."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


class Outgoing:
    """A blob that is being sent: its chunks, read when they are needed."""

    def __init__(self, path: Path, sha256: str, length: int) -> None:
        self.sha256 = sha256
        self.length = length
        self._transfer = transfer_id(sha256)
        self._fd = os.open(path, os.O_RDONLY)

    def chunk(self, index: int) -> bytes:
        """The bytes to publish for one chunk."""
        return make_chunk(self._transfer, index, os.pread(self._fd, CHUNK_BYTES, index * CHUNK_BYTES))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
