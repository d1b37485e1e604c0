"""Blobs and unfinished blobs on a real disk."""

from __future__ import annotations

import hashlib
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from edge_client import faults
from edge_client.errors import PayloadError
from edge_client.transport.blobs import BlobStore, Incoming, Outgoing
from edge_client.wire.chunks import CHUNK_BYTES, make_chunk, parse_chunk, transfer_id

DATA = random.Random(1).randbytes(2 * CHUNK_BYTES + 100)
SHA = hashlib.sha256(DATA).hexdigest()


def _store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs", tmp_path / "tmp")


def _incoming(store: BlobStore, **changes: Any) -> Incoming:
    fields = {"sha256": SHA, "length": len(DATA), "max_window_bytes": 1 << 20, "point": "part"}
    return Incoming(store, "name", **fields | changes)


def _chunk(index: int, data: bytes = DATA, sha256: str = SHA) -> Any:
    return parse_chunk(make_chunk(transfer_id(sha256), index, data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]))


def test_chunks_in_any_order_become_the_blob(tmp_path: Path) -> None:
    """The last first; a second copy is told apart; afterwards nothing unfinished is left."""
    store = _store(tmp_path)
    incoming = _incoming(store)
    assert [incoming.add(_chunk(index), 0.0) for index in (2, 0, 2, 1)] == [True, True, False, True]
    path = incoming.finish()
    incoming.close()
    incoming.close()
    assert path.read_bytes() == DATA
    assert store.has(SHA)
    assert list(store.names()) == [SHA]
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("restart_after", [0, 1, 2])
def test_the_hash_is_right_whatever_came_first(tmp_path: Path, order: tuple[int, ...], restart_after: int) -> None:
    """Also over a restart in between; and wrong bytes first make it begin again."""
    store = _store(tmp_path)
    incoming = _incoming(store)
    for index in order:
        incoming.add(_chunk(index, data=bytes(len(DATA))), 0.0)
    with pytest.raises(PayloadError, match="another hash"):
        incoming.finish()
    for num, index in enumerate(order):
        if num == restart_after:
            incoming.close()
            incoming = _incoming(store)
        incoming.add(_chunk(index), 0.0)
    assert incoming.finish().read_bytes() == DATA
    incoming.close()


def test_a_restart_goes_on_from_what_is_here(tmp_path: Path) -> None:
    """Only the second chunk is asked for."""
    first = _incoming(_store(tmp_path))
    for index in (0, 2):
        first.add(_chunk(index), 0.0)
    first.close()
    second = _incoming(_store(tmp_path))
    assert second.chunks.request(0.0) == ((1, 1),)
    second.add(_chunk(1), 0.0)
    assert second.finish().read_bytes() == DATA
    second.close()


def test_what_can_be_fetched_again_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `sync` the part, its folder and the new folder's entry; without it nothing."""
    calls: list[int] = []
    monkeypatch.setattr("os.fsync", calls.append)
    for number, sync in enumerate((False, True)):
        incoming = _incoming(_store(tmp_path / str(number)), sync=sync)
        for index in range(3):
            incoming.add(_chunk(index), 0.0)
        incoming.finish()
        incoming.close()
        assert len(calls) == (3 if sync else 0)


@pytest.mark.parametrize("damaged", [DATA[:-1], b"", b"x" * len(DATA)])
def test_a_blob_is_verified_once_per_process_and_a_wrong_one_is_removed(tmp_path: Path, damaged: bytes) -> None:
    """A power cut may leave anything under the name of a blob that was not synced."""
    path = _store(tmp_path).write(DATA, SHA, point="test")
    store = _store(tmp_path)
    assert store.verified(SHA)
    path.write_bytes(damaged)
    assert store.verified(SHA)  # not read again
    store = _store(tmp_path)
    assert not store.verified(SHA)
    assert not store.has(SHA)
    assert not store.verified(SHA)


def test_a_map_that_lies_is_found_out_by_the_hash(tmp_path: Path) -> None:
    """As after a power cut: the map says that all is here, the part is empty; the transfer begins again."""
    store = _store(tmp_path)
    store.temporary_path("name.part").write_bytes(b"")
    store.temporary_path("name.map").write_bytes(b"\1\1\1")
    incoming = _incoming(store)
    assert incoming.chunks.complete
    with pytest.raises(PayloadError, match="another hash"):
        incoming.finish()
    assert incoming.chunks.num_missing == 3
    incoming.close()
    again = _incoming(store)
    assert again.chunks.num_missing == 3  # the map on disk does not lie any more
    for index in range(3):
        again.add(_chunk(index), 0.0)
    assert again.finish().read_bytes() == DATA
    again.close()


@pytest.mark.parametrize("left", ["map", "both"])
def test_the_map_of_something_else_is_not_believed_now_or_after_the_next_restart(tmp_path: Path, left: str) -> None:
    """A map without its part, and one of a blob of five chunks."""
    store = _store(tmp_path)
    store.temporary_path("name.map").write_bytes(b"\1\1\1" if left == "map" else b"\1" * 5)
    if left == "both":
        store.temporary_path("name.part").write_bytes(b"old")
    first = _incoming(store)
    assert first.chunks.num_missing == 3
    first.add(_chunk(0), 0.0)
    first.close()
    second = _incoming(store)
    assert second.chunks.num_missing == 2
    second.close()


def test_a_chunk_that_could_not_be_written_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full once."""
    incoming = _incoming(_store(tmp_path))
    assert incoming.chunks.request(0.0) == ((0, 3),)
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:part.chunk")])
    with pytest.raises(OSError, match="injected at part"):
        incoming.add(_chunk(1), 0.0)
    assert incoming.chunks.num_missing == 3
    assert incoming.add(_chunk(1), 0.0)
    incoming.close()


def test_a_chunk_of_another_blob_is_refused(tmp_path: Path) -> None:
    """Another transfer, an index behind the end, a wrong length; nothing is written."""
    incoming = _incoming(_store(tmp_path))
    other = hashlib.sha256(b"other").hexdigest()
    short = parse_chunk(make_chunk(transfer_id(SHA), 0, b"short"))
    behind = parse_chunk(make_chunk(transfer_id(SHA), 3, b"x"))
    for chunk in (_chunk(0, sha256=other), short, behind):
        with pytest.raises(PayloadError, match=r"transfer|range"):
            incoming.add(chunk, 0.0)
    assert incoming.chunks.num_missing == 3
    incoming.close()


def test_cleaning_up_keeps_what_is_named(tmp_path: Path) -> None:
    """A blob, an unfinished lease with both its files; everything else goes."""
    store = _store(tmp_path)
    hashes = [hashlib.sha256(text).hexdigest() for text in (b"1", b"2")]
    for text, sha256 in zip((b"1", b"2"), hashes, strict=True):
        store.write(text, sha256, point="test")
    for name in ("kept.part", "kept.map", "gone.part", "gone.map", "fold-r-1"):
        store.temporary_path(name).write_bytes(b"x")
    store.keep_only({hashes[0]}, {"kept"})
    assert list(store.names()) == [hashes[0]]
    assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == ["kept.map", "kept.part"]
    store.discard("kept")
    assert list((tmp_path / "tmp").iterdir()) == []
    store.remove(hashes[0])
    store.remove(hashes[0])
    assert not store.has(hashes[0])


def test_outgoing_chunks_are_the_files_bytes(tmp_path: Path) -> None:
    """The last is 100 bytes long."""
    store = _store(tmp_path)
    outgoing = Outgoing(store.write(DATA, SHA, point="test"), SHA, len(DATA))
    bodies = [bytes(parse_chunk(outgoing.chunk(index)).body) for index in range(3)]
    outgoing.close()
    assert b"".join(bodies) == DATA
    assert len(bodies[2]) == 100


def test_the_files_are_for_their_owner_only(tmp_path: Path) -> None:
    """Weights are nobody else's business."""
    incoming = _incoming(_store(tmp_path))
    incoming.close()
    assert all(path.stat().st_mode & 0o077 == 0 for path in [tmp_path / "blobs", *(tmp_path / "tmp").iterdir()])
