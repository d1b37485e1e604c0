"""The file format of models and updates: a small table of contents, then the tensors as raw little-endian bytes.

    offset  size  field
    0       4     magic "FFT1"
    4       4     meta length m, at most 16,384
    8       4     number of tensors, at most 8,192
    12      4     table length t, at most 1 MiB
    16      8     data length
    24      4     CRC-32 of meta and table
    28      4     zero
    32      m     meta: one msgpack map
    32+m    t     table: per tensor a 2-byte length and msgpack [name, codec, shape]; names are unique
    ...           zeros up to a multiple of 64
    ...           data: the tensors in the order of the table, without gaps

    codec   bytes of n elements
    fp32    4n
    fp16    2n
    bf16    2n
    int8    4 per channel (float32 scale; a channel is an index of dimension 0), then n
    i64     8n

Covers: the bytes before the data, and which codec a tensor travels with. Needs neither torch nor numpy.
Does not cover: the values (`wire/tensors.py`), what a round expects (`coordinator/conductor/intake.py`).

Every failure of a peer's bytes is a `PayloadError`; nothing is allocated in proportion to a number that the peer wrote
before that number was held against the real length of the file.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.errors import PayloadError
from edge_client.wire import frames

__all__ = [
    "CODECS",
    "CONFUSION",
    "EXTRA_PREFIX",
    "FLOAT_CODECS",
    "MAX_HEADER_BYTES",
    "MEMORY_PREFIX",
    "MODEL_PREFIX",
    "Entry",
    "Header",
    "TableRow",
    "build_header",
    "codec_rule",
    "parse_header",
    "payload_kind",
    "read_header",
    "tensor_bytes",
]

TableRow = tuple[str, str, Sequence[int]]  # name, codec, shape

MODEL_PREFIX = "model/"  # of the tensors of a state dict; others are those of a method, and `evaluation/`
EXTRA_PREFIX = "extra/"  # of a method's own tensors, which travel with the model and are folded like it
MEMORY_PREFIX = "memory/"  # of what the server learnt from knowledge; it never travels
CONFUSION = "evaluation/confusion"  # counts per class of an evaluation, one row for each true class
FLOAT_CODECS = ("fp32", "fp16", "bf16", "int8")
CODECS = (*FLOAT_CODECS, "i64")

_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "i64": 8}
_INTERNED = {codec: codec for codec in CODECS}  # thousands of entries share five strings
_FIXED = struct.Struct("<4sIIIQII")
_ROW_LENGTH = struct.Struct("<H")
_MAGIC = b"FFT1"
_ALIGNMENT = 64
_MAX_META_BYTES = frames.MAX_BODY_BYTES
_MAX_TENSORS = 8192
_MAX_TABLE_BYTES = 1 << 20
_MAX_ROW_BYTES = 320  # 256 characters, 8 dimensions of 5 bytes, and room
_MAX_NAME_CHARS = 256  # ASCII only: one wide character would make Python keep the whole name in 4 bytes per character
_MAX_DIMS = 8
_MAX_DIM = 2**31
_MAX_ELEMENTS = 2**40  # also of the non-zero dimensions of an empty tensor: strides must not overflow

MAX_HEADER_BYTES = -(-(_FIXED.size + _MAX_META_BYTES + _MAX_TABLE_BYTES) // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a container; `offset` counts from the start of the data."""

    name: str
    codec: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything of a container but the values."""

    meta: dict[str, Any]
    entries: tuple[Entry, ...]
    data_offset: int
    total_bytes: int


def codec_rule(num_dims: int, run_codec: str, *, integer: bool) -> str:
    """The codec of one tensor in a run: integers stay exact, and biases and norm vectors are too small to squeeze."""
    if run_codec not in FLOAT_CODECS:
        raise ValueError(f"expected a codec of a run ({', '.join(FLOAT_CODECS)}), got {run_codec!r}")
    if integer:
        return "i64"
    return "fp32" if run_codec == "int8" and num_dims < 2 else run_codec


def payload_kind(run_codec: str) -> str:
    """What an update's tensors of model and method are: deltas where the codec rounds; they lose less than weights."""
    return "params" if run_codec == "fp32" else "delta"


def tensor_bytes(codec: str, shape: Sequence[int]) -> int:
    """Exact bytes of a tensor on the wire."""
    if codec not in _ITEM_BYTES:
        raise ValueError(f"expected a codec of {', '.join(CODECS)}, got {codec!r}")
    if codec == "int8" and len(shape) < 2:
        raise ValueError(f"int8 needs two dimensions or more, got the shape {tuple(shape)}; use fp32")
    if any(dim < 0 for dim in shape):
        raise ValueError(f"expected dimensions of 0 or more, got the shape {tuple(shape)}")
    return math.prod(shape) * _ITEM_BYTES[codec] + (4 * shape[0] if codec == "int8" else 0)


def build_header(meta: Mapping[str, Any], table: Sequence[TableRow]) -> bytes:
    """The bytes before the data, padding included; raises `ValueError` for what `parse_header` would refuse."""
    packed_meta = frames.pack(dict(meta))
    rows = bytearray()
    data_bytes = 0
    for name, codec, shape in table:
        row = frames.pack([name, codec, [int(dim) for dim in shape]])
        rows += _ROW_LENGTH.pack(min(len(row), 0xFFFF)) + row
        data_bytes += tensor_bytes(codec, shape)
    crc = zlib.crc32(rows, zlib.crc32(packed_meta))
    fixed = _FIXED.pack(_MAGIC, len(packed_meta), len(table), len(rows), data_bytes, crc, 0)
    head = fixed + packed_meta + bytes(rows)
    head += bytes(-len(head) % _ALIGNMENT)
    try:
        parse_header(head, len(head) + data_bytes)
    except PayloadError as error:
        raise ValueError(f"this container would be refused: {error.detail}") from None
    return head


def parse_header(data: bytes, total_bytes: int) -> Header:
    """Decode the start of a container whose real length is `total_bytes`; `data` holds at least the header."""
    meta_bytes, num_tensors, data_offset, crc = _check_fixed(data, total_bytes)
    if len(data) < data_offset:
        raise PayloadError("truncated", f"container header of {data_offset} bytes, only {len(data)} came")
    view = memoryview(data)
    table_end = _FIXED.size + meta_bytes + _FIXED.unpack_from(data)[3]
    if zlib.crc32(view[_FIXED.size : table_end]) != crc:
        raise PayloadError("damaged", "container checksum differs")
    if any(view[table_end:data_offset]):
        raise PayloadError("malformed", "container padding is not zero")
    meta = frames.unpack(view[_FIXED.size : _FIXED.size + meta_bytes])
    if not isinstance(meta, dict):
        raise PayloadError("malformed", f"container meta is a {type(meta).__name__}, expected a map")
    entries = _parse_table(view[_FIXED.size + meta_bytes : table_end], num_tensors, total_bytes - data_offset)
    return Header(meta, entries, data_offset, total_bytes)


def read_header(path: Path) -> Header:
    """Decode the header of a file, reading nothing of its data; an `OSError` is our disk's and passes."""
    with open(path, "rb", buffering=0) as file:
        total_bytes = os.fstat(file.fileno()).st_size
        _, _, data_offset, _ = _check_fixed(file.read(_FIXED.size), total_bytes)
        head = os.pread(file.fileno(), data_offset, 0)
    return parse_header(head, total_bytes)


def _check_fixed(data: bytes, total_bytes: int) -> tuple[int, int, int, int]:
    """Hold every length of the fixed part against its limit and the real length."""
    if len(data) < _FIXED.size:
        raise PayloadError("truncated", f"container of {len(data)} bytes is shorter than its {_FIXED.size} byte start")
    magic, meta_bytes, num_tensors, table_bytes, data_bytes, crc, zero = _FIXED.unpack_from(data)
    if magic != _MAGIC or zero != 0:
        raise PayloadError("malformed", "not a fedfit container")
    for what, value, limit in (
        ("meta bytes", meta_bytes, _MAX_META_BYTES),
        ("tensors", num_tensors, _MAX_TENSORS),
        ("table bytes", table_bytes, _MAX_TABLE_BYTES),
    ):
        if value > limit:
            raise PayloadError("too_large", f"container announces {value} {what}, at most {limit} are read")
    end = _FIXED.size + meta_bytes + table_bytes
    data_offset = end + -end % _ALIGNMENT
    if total_bytes < data_offset + data_bytes:
        raise PayloadError("truncated", f"container of {total_bytes} bytes announces {data_offset + data_bytes}")
    if total_bytes > data_offset + data_bytes:
        raise PayloadError("malformed", f"container of {total_bytes} bytes announces only {data_offset + data_bytes}")
    return meta_bytes, num_tensors, data_offset, crc


def _parse_table(table: memoryview, num_tensors: int, data_bytes: int) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    names: set[str] = set()
    position = offset = 0
    for index in range(num_tensors):
        if position + _ROW_LENGTH.size > len(table):
            raise PayloadError("malformed", f"container table ends at tensor {index} of {num_tensors}")
        (length,) = _ROW_LENGTH.unpack_from(table, position)
        position += _ROW_LENGTH.size
        if position + length > len(table):
            raise PayloadError("malformed", f"container table ends inside tensor {index} of {num_tensors}")
        entry = _parse_row(table[position : position + length], index, offset)
        position += length
        offset += entry.nbytes
        if offset > data_bytes:
            raise PayloadError("malformed", f"container data ends inside tensor {index} ({entry.name[:80]!r})")
        if entry.name in names:
            raise PayloadError("malformed", f"container repeats the tensor {entry.name[:80]!r}")
        names.add(entry.name)
        entries.append(entry)
    if position != len(table) or offset != data_bytes:
        raise PayloadError("malformed", f"container has bytes that none of its {num_tensors} tensors owns")
    return tuple(entries)


def _parse_row(row: memoryview, index: int, offset: int) -> Entry:
    value = frames.unpack(row, limit=_MAX_ROW_BYTES)
    if not isinstance(value, tuple) or len(value) != 3:
        raise PayloadError("malformed", f"tensor {index}: expected [name, codec, shape]")
    name, codec, shape = value
    if not isinstance(name, str) or not _is_name(name):
        raise PayloadError("malformed", f"tensor {index}: expected a name of 1 to {_MAX_NAME_CHARS} ASCII characters")
    if not isinstance(codec, str) or codec not in _INTERNED:
        raise PayloadError("malformed", f"tensor {index}: expected a codec of {', '.join(CODECS)}")
    least = 2 if codec == "int8" else 0
    if not isinstance(shape, tuple) or not least <= len(shape) <= _MAX_DIMS:
        raise PayloadError(
            "malformed", f"tensor {index}: expected a {codec} shape of {least} to {_MAX_DIMS} dimensions"
        )
    _check_dims(shape, index)
    return Entry(name, _INTERNED[codec], shape, offset, tensor_bytes(codec, shape))


def _is_name(name: str) -> bool:
    return 1 <= len(name) <= _MAX_NAME_CHARS and name.isascii() and name.isprintable()


def _check_dims(shape: tuple[object, ...], index: int) -> None:
    count = 1  # a Python int: it cannot wrap
    for dim in shape:
        if not isinstance(dim, int) or isinstance(dim, bool) or not 0 <= dim <= _MAX_DIM:
            raise PayloadError("malformed", f"tensor {index}: expected dimensions of 0 to {_MAX_DIM}")
        count *= max(dim, 1)
    if count > _MAX_ELEMENTS:
        raise PayloadError("too_large", f"tensor {index} has more than {_MAX_ELEMENTS} elements")
