"""A transfer over a bad link and through crashes: the exact bytes or a refusal, and never a hang.

The link loses, repeats, reorders and damages chunks; the receiver dies and goes on from its map, which may lie.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.errors import PayloadError
from edge_client.transport.blobs import BlobStore, Incoming
from edge_client.wire.chunks import CHUNK_BYTES, make_chunk, num_chunks, parse_chunk, transfer_id
from edge_client.wire.reassembly import Reassembly, expand

lengths = st.one_of(
    st.integers(1, 3), st.integers(1, 24 * CHUNK_BYTES), st.integers(1, 24).map(lambda n: n * CHUNK_BYTES)
)


def _body(data: bytes, index: int) -> bytes:
    return data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


class Link:
    """Chunks on their way: lost, twice, out of order, damaged, or of another blob."""

    def __init__(self, rng: random.Random, data: bytes, *, loss: float, noise: float) -> None:
        self.rng, self.data, self.loss, self.noise = rng, data, loss, noise
        self.transfer = transfer_id(hashlib.sha256(data).hexdigest())
        self.queue: list[bytes] = []

    def send(self, index: int) -> None:
        if self.rng.random() < self.loss:
            return
        chunk = make_chunk(self.transfer, index, _body(self.data, index))
        for _ in range(1 + (self.rng.random() < self.noise)):
            self.queue.insert(self.rng.randrange(len(self.queue) + 1), chunk)
        if self.rng.random() < self.noise:
            damaged = bytearray(chunk)
            damaged[self.rng.randrange(len(damaged))] ^= 1 << self.rng.randrange(8)
            self.queue.append(bytes(damaged))
        if self.rng.random() < self.noise:
            self.queue.append(make_chunk(bytes(16), index, b"of another blob"))

    def arriving(self) -> list[bytes]:
        arrived, self.queue = self.queue, []
        return arrived


@settings(max_examples=120)
@given(length=lengths, seed=st.integers(0, 2**32), loss=st.sampled_from([0, 0.1, 0.6]), window=st.integers(1, 4 << 20))
def test_every_blob_arrives_whatever_the_link_does(length: int, seed: int, loss: float, window: int) -> None:
    """Without files: the requests stay inside the window and the allowance, and cover all that is missing."""
    rng = random.Random(seed)
    data = rng.randbytes(length)
    link = Link(rng, data, loss=loss, noise=0.2)
    sha256 = hashlib.sha256(data).hexdigest()
    receiver = Reassembly(sha256=sha256, length=length, max_window_bytes=window)
    result = bytearray(length)
    now = 0.0
    for _ in range(3000):
        if receiver.complete:
            break
        allowance = rng.choice([None, None, 0, CHUNK_BYTES, 1 << 20])
        before = receiver.outstanding_bytes
        ranges = receiver.request(now, allowance_bytes=allowance)
        asked = list(expand(ranges, receiver.num_chunks))
        assert len(asked) == len(set(asked))
        assert allowance is None or len(asked) * CHUNK_BYTES <= max(allowance, 0)
        assert receiver.outstanding_bytes <= max(window, CHUNK_BYTES, before)
        for index in asked:
            link.send(index)
        for payload in link.arriving():
            try:
                chunk = parse_chunk(payload)
                offset = receiver.accept(chunk, now)
            except PayloadError:
                continue
            if offset is not None:
                result[offset : offset + len(chunk.body)] = chunk.body
        if rng.random() < 0.02:
            receiver.lost_connection()
        if rng.random() < 0.02:
            have = receiver.bitmap()
            receiver = Reassembly(sha256=sha256, length=length, max_window_bytes=window, have=have)
        now += rng.choice([0.01, 0.5, 5.0])
    assert receiver.complete
    assert bytes(result) == data


@settings(max_examples=40)
@given(length=st.integers(1, 6 * CHUNK_BYTES), seed=st.integers(0, 2**32), crashes=st.sampled_from([0, 0.05, 0.2]))
def test_every_blob_arrives_on_disk_through_crashes_and_maps_that_lie(length: int, seed: int, crashes: float) -> None:
    """With files; a crash may leave any map, and a part without its newest bytes. The blob has its hash or no name."""
    rng = random.Random(seed)
    data = rng.randbytes(length)
    sha256 = hashlib.sha256(data).hexdigest()
    link = Link(rng, data, loss=0.2, noise=0.2)
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(Path(folder, "blobs"), Path(folder, "tmp"))

        def begin() -> Incoming:
            return Incoming(store, "n", sha256=sha256, length=length, max_window_bytes=1 << 20, point="p")

        incoming, now = begin(), 0.0
        for _ in range(3000):
            now += rng.choice([0.01, 5.0])
            for index in expand(incoming.chunks.request(now), incoming.chunks.num_chunks):
                link.send(index)
            for payload in link.arriving():
                try:
                    incoming.add(parse_chunk(payload), now)
                except PayloadError:
                    continue
            if incoming.chunks.complete:
                try:
                    path = incoming.finish()
                    break
                except PayloadError:
                    assert not store.has(sha256)
            if rng.random() < crashes:
                incoming.close()
                _power_cut(rng, Path(folder, "tmp"))
                incoming = begin()
        incoming.close()
        assert path.read_bytes() == data
        assert list(Path(folder, "tmp").iterdir()) == []


def _power_cut(rng: random.Random, folder: Path) -> None:
    """What was not synced is anything: a map of ones, of nothing, of another length; a part that is cut or garbled."""
    name_map, part = folder / "n.map", folder / "n.part"
    what = rng.randrange(6)
    if what == 0:
        name_map.write_bytes(b"\1" * len(name_map.read_bytes()))
    elif what == 1:
        name_map.write_bytes(b"\1" * rng.randrange(9))
    elif what == 2:
        part.write_bytes(part.read_bytes()[: rng.randrange(part.stat().st_size + 1)])
    elif what == 3:
        part.write_bytes(rng.randbytes(part.stat().st_size))
    elif what == 4:
        rng.choice([name_map, part]).unlink()


def test_another_blob_under_the_same_hash_is_refused_and_the_right_one_still_arrives(tmp_path: Path) -> None:
    """A sender that lies sends chunks with the right transfer id and wrong bytes; nothing of it gets the name."""
    data = random.Random(1).randbytes(2 * CHUNK_BYTES)
    sha256 = hashlib.sha256(data).hexdigest()
    store = BlobStore(tmp_path / "blobs", tmp_path / "tmp")
    incoming = Incoming(store, "n", sha256=sha256, length=len(data), max_window_bytes=1 << 20, point="p")
    for wrong in (bytes(len(data)), data):
        for index in range(num_chunks(len(data))):
            incoming.add(parse_chunk(make_chunk(transfer_id(sha256), index, _body(wrong, index))), 0.0)
        if wrong != data:
            with pytest.raises(PayloadError, match="another hash"):
                incoming.finish()
            assert not store.has(sha256)
            assert incoming.num_mismatches == 1
    assert incoming.finish().read_bytes() == data
    incoming.close()


def test_a_receiver_that_was_allowed_nothing_for_long_asks_as_soon_as_it_may() -> None:
    """An hour with nothing left of the shared limit, then one chunk's worth."""
    receiver = Reassembly(sha256="0" * 64, length=10 * CHUNK_BYTES, max_window_bytes=1 << 20)
    for now in range(3600):
        assert receiver.request(float(now), allowance_bytes=CHUNK_BYTES - 1) == ()
    assert receiver.request(3600.0, allowance_bytes=CHUNK_BYTES) == ((0, 1),)


def test_what_was_asked_for_is_given_back_after_a_stall_even_when_nothing_is_allowed() -> None:
    """Otherwise devices that vanished would hold the shared limit for ever."""
    receiver = Reassembly(sha256="0" * 64, length=10 * CHUNK_BYTES, max_window_bytes=1 << 20)
    assert receiver.request(0.0) == ((0, 4),)
    assert receiver.outstanding_bytes == 4 * CHUNK_BYTES
    assert receiver.request(3.9, allowance_bytes=0) == ()
    assert receiver.outstanding_bytes == 4 * CHUNK_BYTES
    assert receiver.request(4.0, allowance_bytes=0) == ()
    assert receiver.outstanding_bytes == 0


def _accept(receiver: Reassembly, index: int) -> int | None:
    body = bytes(CHUNK_BYTES)
    return receiver.accept(parse_chunk(make_chunk(receiver.transfer, index, body)), 0.0)


def test_a_chunk_that_is_here_may_come_again_a_few_times_only() -> None:
    """64 repeats are a broker's, or of the time before a restart; the next one is nobody's mistake."""
    receiver = Reassembly(sha256="0" * 64, length=3 * CHUNK_BYTES, max_window_bytes=1 << 20)
    assert _accept(receiver, 1) == CHUNK_BYTES
    assert [_accept(receiver, 1) for _ in range(64)] == [None] * 64
    with pytest.raises(PayloadError, match="unasked"):
        _accept(receiver, 1)
    assert _accept(receiver, 2) == 2 * CHUNK_BYTES  # one that is missing is welcome, asked for or not


def test_what_was_given_up_may_come_twice() -> None:
    """Thirty times four chunks are asked for and given up as lost, then all come: 4 new ones and 116 repeats."""
    receiver = Reassembly(sha256="0" * 64, length=4 * CHUNK_BYTES, max_window_bytes=1 << 20)
    for _ in range(30):
        assert receiver.request(0.0) == ((0, 4),)
        receiver.lost_connection()
    for _ in range(30):
        for index in range(4):
            _accept(receiver, index)
    assert receiver.complete
