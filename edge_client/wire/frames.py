"""The envelope of every control message, and the only msgpack decoder in fedfit.

    offset  size  field
    0       2     magic "FF"
    2       1     version of the wire (1)
    3       1     kind of the message
    4       2     body length n, at most 16,384
    6       2     zero
    8       4     CRC-32 of the body
    12      n     body: one msgpack map
    12+n    32    HMAC-SHA256 with the device's key (see `seal`)

The CRC tells damage from forgery: damage is dropped quietly and sent again, a wrong HMAC is counted and shown.
Every failure is a `PayloadError`; nothing larger than the input is allocated before the limits are checked.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from typing import Any

import msgpack

from edge_client.errors import PayloadError

__all__ = ["MAC_BYTES", "MAX_BODY_BYTES", "VERSION", "Frame", "open_frame", "pack", "peek", "seal", "unpack"]

VERSION = 1
MAX_BODY_BYTES = 16_384
MAC_BYTES = 32
_HEADER = struct.Struct("<2sBBHHI")


class Frame:
    """A message that came from who it says: its kind and its decoded body."""

    __slots__ = ("body", "kind")

    def __init__(self, kind: int, body: dict[str, Any]) -> None:
        self.kind = kind
        self.body = body


def pack(value: object) -> bytes:
    """msgpack of plain data."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def _refuse_ext(code: int, data: bytes) -> object:
    raise PayloadError("malformed", f"msgpack extension type {code} is not used here")


def _unique_keys(pairs: list[tuple[object, object]]) -> dict[object, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise PayloadError("malformed", "a msgpack map repeats a key")
    return result


def unpack(data: bytes | memoryview, *, limit: int = MAX_BODY_BYTES) -> Any:
    """Decode hostile msgpack of at most `limit` bytes; lists come back as tuples."""
    if len(data) > limit:
        raise PayloadError("too_large", f"msgpack of {len(data)} bytes, at most {limit} are read")
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=False,
            max_array_len=4096,
            max_map_len=256,
            max_str_len=8192,  # a `Text` of 2,000 characters, four bytes each
            max_bin_len=limit,
            max_ext_len=0,
            ext_hook=_refuse_ext,
            object_pairs_hook=_unique_keys,
        )
    except PayloadError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise PayloadError("malformed", f"not the msgpack expected here ({type(error).__name__})") from None


def _mac(key: bytes, context: str, head: bytes) -> bytes:
    """`context` names federation, device and direction, so that no message is valid anywhere else."""
    return hmac.digest(key, context.encode() + b"\0" + head, hashlib.sha256)


def seal(kind: int, body: object, *, key: bytes, context: str) -> bytes:
    """A complete frame, authenticated for `context`."""
    packed = pack(body)
    if len(packed) > MAX_BODY_BYTES:
        raise ValueError(f"message body of {len(packed)} bytes; at most {MAX_BODY_BYTES} travel in one frame")
    head = _HEADER.pack(b"FF", VERSION, kind, len(packed), 0, zlib.crc32(packed)) + packed
    return head + _mac(key, context, head)


def peek(data: bytes) -> int:
    """The kind of a well-formed frame, which is not yet authenticated."""
    if len(data) < _HEADER.size + MAC_BYTES:
        raise PayloadError("malformed", f"frame of {len(data)} bytes is shorter than its header")
    magic, version, kind, length, zero, crc = _HEADER.unpack_from(data)
    if magic != b"FF" or zero != 0:
        raise PayloadError("malformed", "not a fedfit frame")
    if version != VERSION:
        raise PayloadError("version", f"wire version {version}, this side speaks {VERSION}")
    if length > MAX_BODY_BYTES or len(data) != _HEADER.size + length + MAC_BYTES:
        raise PayloadError("malformed", f"frame of {len(data)} bytes does not hold a body of {length}")
    if zlib.crc32(data[_HEADER.size : -MAC_BYTES]) != crc:
        raise PayloadError("damaged", "frame checksum differs")
    return int(kind)


def open_frame(data: bytes, *, key: bytes, context: str) -> Frame:
    """Check and decode a frame: form, checksum, HMAC, then the body."""
    kind = peek(data)
    if not hmac.compare_digest(_mac(key, context, data[:-MAC_BYTES]), data[-MAC_BYTES:]):
        raise PayloadError("forged", "the HMAC does not fit this device's key")
    body = unpack(data[_HEADER.size : -MAC_BYTES])
    if not isinstance(body, dict):
        raise PayloadError("malformed", f"message body is a {type(body).__name__}, expected a map")
    return Frame(kind, body)
