"""The parts that the devices of a simulation fetch: on disk once for all of them, but fetched by each of them.

Every device asks for every chunk and keeps its own account of what has arrived, so that bytes are those of a fleet. The
first chunk of each index that comes to any device is written; what a device would have on its own disk it remembers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from edge_client.records import PartRef
from edge_client.transport.blobs import BlobStore, Incoming
from edge_client.wire.chunks import Chunk
from edge_client.wire.flow_control import PULL_WINDOW_BYTES
from edge_client.wire.reassembly import Reassembly

__all__ = ["PartsOfDevice", "SharedParts"]


class SharedParts:
    """The disk: whoever has every chunk of a part finds the whole here."""

    def __init__(self, folder: Path, *, keep: set[str]) -> None:
        """`keep` are parts of an earlier process that its devices still have; the others are removed."""
        self._blobs = BlobStore(folder / "parts", folder / "arriving")
        self._blobs.keep_only(keep, set())
        self._arriving: dict[str, Incoming] = {}
        self._last_round: dict[str, int] = {}

    def path(self, sha256: str) -> Path:
        """Where a part is that was fetched."""
        return self._blobs.path(sha256)

    def has(self, sha256: str) -> bool:
        """Whether it is there, whole."""
        return self._blobs.has(sha256)

    def add(self, part: PartRef, chunk: Chunk, now: float) -> None:
        """A chunk came to some device; the first one of its index is written."""
        if self._blobs.has(part.sha256):
            return
        incoming = self._arriving.get(part.sha256)
        if incoming is None:
            incoming = self._arriving[part.sha256] = Incoming(
                self._blobs,
                part.sha256,
                sha256=part.sha256,
                length=part.length,
                max_window_bytes=PULL_WINDOW_BYTES,
                point="daemon.part",
                sync=False,
            )
        if not incoming.chunks.has(chunk.index):
            incoming.add(chunk, now)
        if incoming.chunks.complete:
            incoming.finish()
            incoming.close()
            del self._arriving[part.sha256]

    def use(self, parts: Iterable[PartRef], round_number: int) -> None:
        """An assignment of that round names these; what neither it nor the round before named is removed."""
        for part in parts:
            self._last_round[part.sha256] = round_number
        for sha256 in [sha256 for sha256, last in self._last_round.items() if last < round_number - 1]:
            del self._last_round[sha256]
            self._blobs.remove(sha256)

    def close(self) -> None:
        """Close all files."""
        for incoming in self._arriving.values():
            incoming.close()
        self._arriving.clear()


class PartsOfDevice:
    """The parts that one device has fetched; a `PartStore` over the disk of all."""

    def __init__(self, shared: SharedParts) -> None:
        self._shared = shared
        self._sha256s: set[str] = set()

    def add(self, sha256s: Iterable[str]) -> None:
        """The device has these."""
        self._sha256s.update(sha256s)

    def keep_only(self, parts: Iterable[PartRef]) -> None:
        """The device removes all others."""
        self._sha256s &= {part.sha256 for part in parts}

    def has(self, sha256: str) -> bool:
        """Whether the device has fetched the part."""
        return sha256 in self._sha256s and self._shared.has(sha256)

    def receive(self, part: PartRef, *, point: str) -> ArrivingPart:
        """Begin to receive a part."""
        return ArrivingPart(part, self._shared, self._sha256s)


class ArrivingPart:
    """A part on its way to one device: its own account of chunks, whose bytes go to the disk of all."""

    def __init__(self, part: PartRef, shared: SharedParts, sha256s: set[str]) -> None:
        """`sha256s` are the parts of the device, of which this will be one."""
        self._part = part
        self._shared = shared
        self._sha256s = sha256s
        self.chunks = Reassembly(sha256=part.sha256, length=part.length, max_window_bytes=PULL_WINDOW_BYTES)

    def add(self, chunk: Chunk, now: float) -> bool:
        """Take a chunk; False if it was here already."""
        is_new = self.chunks.accept(chunk, now) is not None
        if is_new:
            self._shared.add(self._part, chunk, now)
        return is_new

    def finish(self) -> None:
        """Every chunk is here; the whole was checked when the first device had them all."""
        self._sha256s.add(self._part.sha256)

    def close(self) -> None:
        """Nothing is open."""
