"""A piece of a blob on the wire: a 32-byte header and up to 122,880 raw bytes.

    offset  size  field
    0       2     magic "FC"
    2       1     version of the wire (1)
    3       1     zero
    4       16    the first 16 bytes of the blob's SHA-256: no chunk fits a transfer it does not belong to
    20      4     index of the chunk
    24      4     length of the body
    28      4     CRC-32 of bytes 0-27 and the body

122,880 is the largest round size that passes AWS IoT Core's limit of 128 KB; every broker's default takes it.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from edge_client.errors import PayloadError
from edge_client.wire.frames import VERSION

__all__ = [
    "CHUNK_BYTES",
    "HEADER_BYTES",
    "Chunk",
    "chunk_length",
    "make_chunk",
    "num_chunks",
    "parse_chunk",
    "peek_chunk",
    "transfer_id",
]

CHUNK_BYTES = 122_880
_HEADER = struct.Struct("<2sBB16sIII")
HEADER_BYTES = _HEADER.size
_CRC_OFFSET = HEADER_BYTES - 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk whose form and checksum are right."""

    transfer: bytes
    index: int
    body: memoryview


def transfer_id(sha256: str) -> bytes:
    """The identifier that the chunks of a blob carry."""
    return bytes.fromhex(sha256[:32])


def num_chunks(length: int) -> int:
    """Chunks of a blob of `length` bytes; an empty blob has none."""
    return -(-length // CHUNK_BYTES)


def chunk_length(length: int, index: int) -> int:
    """Body bytes of one chunk of a blob of `length` bytes."""
    return min(CHUNK_BYTES, length - index * CHUNK_BYTES)


def make_chunk(transfer: bytes, index: int, body: bytes) -> bytes:
    """A chunk ready to publish."""
    head = _HEADER.pack(b"FC", VERSION, 0, transfer, index, len(body), 0)[:_CRC_OFFSET]
    crc = zlib.crc32(body, zlib.crc32(head))
    return b"".join((head, crc.to_bytes(4, "little"), body))


def peek_chunk(payload: bytes) -> tuple[bytes, int] | None:
    """The transfer and the index in a chunk's header, to skip an unwanted chunk quickly; None if it is no chunk."""
    if len(payload) <= HEADER_BYTES or payload[:2] != b"FC":
        return None
    return payload[4:20], int.from_bytes(payload[20:24], "little")


def parse_chunk(payload: bytes) -> Chunk:
    """Check a chunk's form and checksum; raises `PayloadError`."""
    if not HEADER_BYTES < len(payload) <= HEADER_BYTES + CHUNK_BYTES:
        raise PayloadError(
            "malformed", f"chunk of {len(payload)} bytes, expected {HEADER_BYTES + 1} to {HEADER_BYTES + CHUNK_BYTES}"
        )
    magic, version, zero, transfer, index, length, crc = _HEADER.unpack_from(payload)
    if magic != b"FC" or zero != 0:
        raise PayloadError("malformed", "not a fedfit chunk")
    if version != VERSION:
        raise PayloadError("version", f"wire version {version}, this side speaks {VERSION}")
    view = memoryview(payload)
    body = view[HEADER_BYTES:]
    if length != len(body):
        raise PayloadError("malformed", f"chunk says {length} bytes and has {len(body)}")
    if zlib.crc32(body, zlib.crc32(view[:_CRC_OFFSET])) != crc:
        raise PayloadError("damaged", "chunk checksum differs")
    return Chunk(transfer, index, body)
