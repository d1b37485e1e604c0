"""The disk that virtual devices share, and what each of them has of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from coordinator.simulation.shared_parts import PartsOfDevice, SharedParts
from edge_client.records import PartRef
from edge_client.wire.chunks import CHUNK_BYTES, Chunk, make_chunk, num_chunks, parse_chunk, transfer_id

DATA = bytes(range(256)) * 1000  # 256,000 bytes: three chunks


def part_of(data: bytes, key: str = "model") -> PartRef:
    return PartRef(key=key, sha256=hashlib.sha256(data).hexdigest(), length=len(data))


def chunks_of(data: bytes) -> list[Chunk]:
    sha256 = hashlib.sha256(data).hexdigest()
    pieces = (data[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES] for i in range(num_chunks(len(data))))
    return [parse_chunk(make_chunk(transfer_id(sha256), i, piece)) for i, piece in enumerate(pieces)]


def test_chunks_that_several_devices_fetched_are_one_file(tmp_path: Path) -> None:
    """Two devices get the three chunks in different orders; the file is whole when the first of them has all."""
    parts, part = SharedParts(tmp_path, keep=set()), part_of(DATA)
    first, second, third = chunks_of(DATA)
    for chunk in (second, second, first, second):
        parts.add(part, chunk, 0.0)
        assert not parts.has(part.sha256)
    parts.add(part, third, 0.0)
    assert parts.path(part.sha256).read_bytes() == DATA
    parts.add(part, first, 0.0)  # the slower one
    assert parts.has(part.sha256)
    assert list((tmp_path / "arriving").iterdir()) == []


def test_parts_that_two_rounds_did_not_name_are_removed(tmp_path: Path) -> None:
    """The model of round 1 stays in round 2, where a device may still be fetching it, and is gone in round 3."""
    parts = SharedParts(tmp_path, keep=set())
    old, settings = part_of(DATA), part_of(b"settings", "run")
    for part, data in ((old, DATA), (settings, b"settings")):
        for chunk in chunks_of(data):
            parts.add(part, chunk, 0.0)
    parts.use((settings, old), 1)
    parts.use((settings,), 2)
    assert parts.has(old.sha256)
    parts.use((settings,), 3)
    assert (parts.has(old.sha256), parts.has(settings.sha256)) == (False, True)
    assert not SharedParts(tmp_path, keep=set()).has(settings.sha256)


def test_a_device_has_what_it_fetched_itself(tmp_path: Path) -> None:
    """The first fetches two of three chunks, the second all: only the second has the part, until it must not."""
    shared, part = SharedParts(tmp_path, keep=set()), part_of(DATA)
    first, second = PartsOfDevice(shared), PartsOfDevice(shared)
    arriving = [device.receive(part, point="daemon.part") for device in (first, second)]
    one, two, three = chunks_of(DATA)
    assert [arriving[0].add(chunk, 0.0) for chunk in (one, three, one)] == [True, True, False]
    for chunk in (one, two, three):
        assert arriving[1].add(chunk, 0.0)
    assert (arriving[0].chunks.complete, arriving[1].chunks.complete) == (False, True)
    arriving[1].finish()
    assert (first.has(part.sha256), second.has(part.sha256), shared.has(part.sha256)) == (False, True, True)
    second.keep_only([part_of(b"settings")])
    assert (second.has(part.sha256), shared.has(part.sha256)) == (False, True)
