"""Arrays in files, read sample by sample: what is plain on disk stays there, what is compressed is unpacked once.

Covers: finding the samples of one device without ever holding those of the others.
Does not cover: what the array means, where in a file it begins (`formats`), arrays in several pieces (`split_arrays`).
Files are read with `pread`, never mapped: the pages of a mapping would count as this process's memory.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import InputError

__all__ = ["ArrayFile", "ByteStream", "Rows", "Stored"]

_PIECE_BYTES = 1 << 20
_MAX_DEFLATE_RATIO = 1032  # what zlib can reach

Indices = NDArray[np.int64]


class ByteStream(Protocol):
    """What unpacking gives: bytes in order."""

    def read(self, size: int, /) -> bytes: ...


class Rows(Protocol):
    """The chosen samples of an array."""

    held_bytes: int  # what they keep in this process's memory

    def take(self, indices: Indices) -> NDArray[Any]:
        """Samples by position among the chosen: [b, *sample shape]."""


class Stored(Protocol):
    """An array on disk; the first axis counts the samples."""

    @property
    def where(self) -> str:
        """File and array, for messages."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def select(self, chosen: Indices) -> Rows:
        """The samples at `chosen`, in that order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFile:
    """An array inside a file; the first axis counts the samples."""

    path: Path
    what: str  # for messages: `images`, `array 'x_train'`
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int  # of the first sample, in the file or in the stream
    open: Callable[[], AbstractContextManager[ByteStream]] | None  # unpacks; none: plain bytes in the file
    stride: int = 0  # bytes from one sample to the next in a plain file, if there is something between them

    @property
    def where(self) -> str:
        """File and array, for messages."""
        return f"{self.path}: {self.what}"

    @property
    def row_bytes(self) -> int:
        """Size of one sample."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def select(self, chosen: Indices) -> Rows:
        """The samples at `chosen`, in that order."""
        self._check_length()
        if self.open is None:
            return _FileRows(self, chosen)
        return _MemoryRows(self._unpack(chosen))

    def read_all(self) -> NDArray[Any]:
        """The whole array."""
        self._check_length()
        return self.select(np.arange(self.shape[0])).take(np.arange(self.shape[0]))

    def refuse(self, problem: str) -> InputError:
        """The error for a file that is not what it says."""
        return InputError(f"{self.where}: {problem}; copy or make the file again")

    def _check_length(self) -> None:
        """Before memory is taken for what a header claims."""
        ratio = 1 if self.open is None else _MAX_DEFLATE_RATIO
        step = self.stride or self.row_bytes
        expected = (self.offset + max(0, self.shape[0] - 1) * step + self.row_bytes * bool(self.shape[0])) // ratio
        try:
            length = self.path.stat().st_size
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from error
        if length < expected:
            raise self.refuse(f"expected at least {expected} bytes in the file, got {length}")

    def _unpack(self, chosen: Indices) -> NDArray[Any]:
        """Read the stream once from end to end and keep the chosen samples."""
        assert self.open is not None
        position_of = np.full(self.shape[0], -1, dtype=np.int64)
        position_of[chosen] = np.arange(len(chosen))
        values = np.empty((len(chosen), *self.shape[1:]), dtype=self.dtype)
        step = max(1, _PIECE_BYTES // max(1, self.row_bytes))
        try:
            with self.open() as stream:
                _read_exactly(stream, self.offset, self)
                for start in range(0, self.shape[0], step):
                    num_rows = min(step, self.shape[0] - start)
                    data = _read_exactly(stream, num_rows * self.row_bytes, self)
                    rows = np.frombuffer(data, dtype=self.dtype).reshape(num_rows, *self.shape[1:])
                    positions = position_of[start : start + num_rows]
                    values[positions[positions >= 0]] = rows[positions >= 0]
                if stream.read(1):
                    raise self.refuse(f"there is more data than {self.shape[0]} samples")
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise self.refuse(f"cannot be unpacked ({error})") from error
        return values


def _read_exactly(stream: ByteStream, size: int, array: ArrayFile) -> bytes:
    pieces = []
    missing = size
    while missing:
        piece = stream.read(min(missing, _PIECE_BYTES))
        if not piece:
            raise array.refuse(f"ends too early, {array.shape[0]} samples of {array.row_bytes} bytes were expected")
        pieces.append(piece)
        missing -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _MemoryRows:
    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values
        self.held_bytes = values.nbytes

    def take(self, indices: Indices) -> NDArray[Any]:
        return self._values[indices]


class _FileRows:
    def __init__(self, array: ArrayFile, chosen: Indices) -> None:
        self._array = array
        self._chosen = chosen
        self.held_bytes = chosen.nbytes

    def take(self, indices: Indices) -> NDArray[Any]:
        array = self._array
        out = np.empty((len(indices), *array.shape[1:]), dtype=array.dtype)
        buffer = out.reshape(-1).view(np.uint8).data
        size, step = array.row_bytes, array.stride or array.row_bytes
        try:
            fd = os.open(array.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot read {array.path}: {error.strerror}") from error
        try:
            for start, row, count in self._runs(indices) if size else ():
                data = os.pread(fd, count * size, array.offset + row * step)
                if len(data) != count * size:
                    raise array.refuse(f"sample {row} cannot be read any more")
                buffer[start * size : (start + count) * size] = data
        finally:
            os.close(fd)
        return out

    def _runs(self, indices: Indices) -> Iterator[tuple[int, int, int]]:
        """Place among `indices`, first row and number of rows of what one call can read: neighbours in the file."""
        rows = self._chosen[indices]
        most = 1 if self._array.stride else max(1, _PIECE_BYTES // self._array.row_bytes)
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        for first, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
            for start in range(first, end, most):
                yield start, int(rows[start]), min(most, end - start)
