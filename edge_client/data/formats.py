"""Where the arrays lie in idx and npz files; every byte of them is checked before it is believed.

idx   00 00 08 <number of axes>, each axis as a big-endian u32, then the bytes; plain or gzip
npz   a zip of .npy files; members that are stored (numpy.savez) are read in place, compressed ones are unpacked
"""

from __future__ import annotations

import functools
import gzip
import struct
import zipfile
import zlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import numpy as np

from edge_client.data.arrays import ArrayFile, ByteStream
from edge_client.errors import InputError

__all__ = ["idx_array", "npz_arrays"]

_UNSIGNED_BYTE = 0x08
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip member: signature, length of its name, length of its extra field
_UNPACK_ERRORS = (OSError, EOFError, zlib.error, zipfile.BadZipFile, ValueError, RuntimeError)  # the last: encrypted


def idx_array(path: Path, *, num_axes: int) -> ArrayFile:
    """The array of an idx file."""
    packed = path.suffix == ".gz"
    what = "labels" if num_axes == 1 else "images"
    header = 4 + 4 * num_axes
    try:
        with gzip.open(path) if packed else open(path, "rb") as file:
            data = file.read(header)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) < header or data[:4] != bytes([0, 0, _UNSIGNED_BYTE, num_axes]):
        raise InputError(
            f"{path}: expected idx {what} (00 00 08 {num_axes:02x} ...), got {data[:4].hex(' ') or 'an empty file'}"
        )
    shape = struct.unpack_from(f">{num_axes}I", data, 4)
    opener = functools.partial(_open_gzip, path) if packed else None
    array = ArrayFile(path=path, what=what, dtype=np.dtype(np.uint8), shape=shape, offset=header, open=opener)
    if not packed and path.stat().st_size != header + shape[0] * array.row_bytes:
        raise array.refuse(f"expected {header + shape[0] * array.row_bytes} bytes, got {path.stat().st_size}")
    return array


def _open_gzip(path: Path) -> AbstractContextManager[ByteStream]:
    return cast(AbstractContextManager[ByteStream], gzip.open(path))


def npz_arrays(path: Path) -> dict[str, ArrayFile]:
    """The arrays of an npz file by name."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            return {info.filename[:-4]: _member(path, archive, info) for info in members}
    except _UNPACK_ERRORS as error:
        detail = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path} as npz: {detail}; write it with numpy.savez") from error


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> ArrayFile:
    what = f"array {info.filename[:-4]!r}"
    with archive.open(info) as stream:
        shape, fortran, dtype = _npy_header(stream)
        header = stream.tell()
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or min(shape, default=0) < 0:
        raise InputError(f"{path}: {what} was not written by numpy; write it with numpy.savez")
    if dtype.hasobject or fortran:
        kind = "Python objects" if dtype.hasobject else "columns first"
        raise InputError(f"{path}: {what} is stored as {kind}; save it as a plain, C-ordered array of numbers")
    stored = info.compress_type == zipfile.ZIP_STORED
    array = ArrayFile(
        path=path,
        what=what,
        dtype=dtype,
        shape=shape or (0,),
        offset=_stored_at(path, info) + header if stored else header,
        open=None if stored else functools.partial(_Member, path, info.filename),
    )
    if not shape or info.file_size != header + shape[0] * array.row_bytes:
        raise array.refuse(f"shape {shape} of {dtype} does not fit its {info.file_size} bytes")
    return array


def _npy_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"npy version {version} is not used for arrays of numbers")


def _stored_at(path: Path, info: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin; the local header's extra field may differ from the directory's."""
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size).ljust(30, b"\0"))
    if signature != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no local header for {info.filename!r}")
    return int(info.header_offset) + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


class _Member:
    """A compressed member of a zip as a stream that closes its archive with it."""

    def __init__(self, path: Path, name: str) -> None:
        self._archive = zipfile.ZipFile(path)
        self._stream = self._archive.open(name)

    def __enter__(self) -> ByteStream:
        return cast(ByteStream, self._stream)

    def __exit__(self, *reason: object) -> None:
        self._stream.close()
        self._archive.close()
