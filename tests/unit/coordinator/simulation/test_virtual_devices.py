"""What virtual devices share on disk, and what outlives them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from coordinator.simulation.virtual_devices import SharedParts, settle_left
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
    parts.used((settings, old), 1)
    parts.used((settings,), 2)
    assert parts.has(old.sha256)
    parts.used((settings,), 3)
    assert (parts.has(old.sha256), parts.has(settings.sha256)) == (False, True)
    assert not SharedParts(tmp_path, keep=set()).has(settings.sha256)


def test_what_a_method_wrote_stays_if_its_update_does(tmp_path: Path) -> None:
    """Killed with three leases in hand: the first was stored, the second not, the third order was half written."""
    for name, order in (("a", json.dumps({"lease": "l1"})), ("b", json.dumps({"lease": "l2"})), ("c", '{"lea')):
        for folder in ("work", "method-state/r-1"):
            (tmp_path / name / folder).mkdir(parents=True)
        (tmp_path / name / "work/order.json").write_text(order)
        (tmp_path / name / "work/update.bin").write_bytes(b"update")
        (tmp_path / name / "method-state/r-1/next").write_bytes(b"new")
        (tmp_path / name / "method-state/r-1/current").write_bytes(b"old")
    settle_left(tmp_path, lambda lease: lease == "l1")
    kept = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/method-state/r-1/*")}
    assert kept == {*(f"{name}/method-state/r-1/current" for name in "abc"), "a/method-state/r-1/stored-l1"}
    assert (tmp_path / "a/method-state/r-1/stored-l1").read_bytes() == b"new"
    assert not list(tmp_path.glob("*/work/*"))
