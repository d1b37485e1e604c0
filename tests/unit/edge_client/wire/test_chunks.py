"""Chunks, byte by byte."""

from __future__ import annotations

import hashlib
import struct
import zlib

import pytest

from edge_client.errors import PayloadError
from edge_client.wire.chunks import (
    CHUNK_BYTES,
    chunk_length,
    make_chunk,
    num_chunks,
    parse_chunk,
    peek_chunk,
    transfer_id,
)
from edge_client.wire.reassembly import expand

SHA = hashlib.sha256(b"blob").hexdigest()


def test_a_chunk_has_the_documented_bytes() -> None:
    """Put together here by hand."""
    head = b"FC\x01\x00" + bytes.fromhex(SHA)[:16] + struct.pack("<II", 5, 3)
    expected = head + struct.pack("<I", zlib.crc32(head + b"abc")) + b"abc"
    assert make_chunk(transfer_id(SHA), 5, b"abc") == expected
    chunk = parse_chunk(expected)
    assert (chunk.transfer, chunk.index, bytes(chunk.body)) == (bytes.fromhex(SHA)[:16], 5, b"abc")


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    """Header and body are covered by the checksum."""
    whole = make_chunk(transfer_id(SHA), 0, b"hello")
    for position in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(PayloadError):
            parse_chunk(bytes(changed))
    for length in range(len(whole)):
        with pytest.raises(PayloadError):
            parse_chunk(whole[:length])


def test_a_chunk_is_never_empty_and_never_larger_than_the_limit() -> None:
    """122,880 bytes of body fit; 128 KB with the header are not reached."""
    largest = make_chunk(transfer_id(SHA), 0, bytes(CHUNK_BYTES))
    assert len(parse_chunk(largest).body) == CHUNK_BYTES
    assert len(largest) <= 128_000
    for body in (b"", bytes(CHUNK_BYTES + 1)):
        with pytest.raises(PayloadError, match="expected 33 to"):
            parse_chunk(make_chunk(transfer_id(SHA), 0, body))


@pytest.mark.parametrize(("length", "count", "last"), [(0, 0, None), (1, 1, 1), (CHUNK_BYTES, 1, CHUNK_BYTES)])
def test_counts(length: int, count: int, last: int | None) -> None:
    """An empty blob has no chunks."""
    assert num_chunks(length) == count
    assert last is None or chunk_length(length, count - 1) == last
    assert num_chunks(CHUNK_BYTES + 1) == 2
    assert chunk_length(CHUNK_BYTES + 1, 1) == 1


def test_ranges_are_expanded_within_the_blob() -> None:
    """(2, 3) of 5 is 2, 3, 4."""
    assert list(expand(((0, 1), (2, 3)), 5)) == [0, 2, 3, 4]
    for bad in ((-1, 1), (0, 0), (0, 6), (5, 1), (2**53, 2**53)):
        with pytest.raises(PayloadError, match="range"):
            list(expand((bad,), 5))


def test_a_look_at_the_header_tells_transfer_and_index_or_nothing() -> None:
    """Without looking at the body: it may be damaged. Too short, empty or something else is none."""
    chunk = make_chunk(bytes(range(16)), 70_000, b"body")
    assert peek_chunk(chunk) == peek_chunk(chunk[:-1] + b"?") == (bytes(range(16)), 70_000)
    assert [peek_chunk(other) for other in (b"", chunk[:32], b"FF" + chunk[2:])] == [None, None, None]
