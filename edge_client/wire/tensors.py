"""Tensors to bytes and back, and containers of tensors on disk; the torch half of `wire/container.py`.

Covers: the five codecs, writing a container tensor by tensor, reading one tensor at a time.
Does not cover: whether values are finite or plausible; that is the coordinator's intake.

int8 is symmetric per channel (dimension 0): scale = max|row| / 127, value = q * scale; a row of zeros has scale 0.
Files are read with `pread`, never mapped: the pages of a mapping would count as this process's memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from edge_client.errors import PayloadError
from edge_client.wire.container import (
    Entry,
    Header,
    TableRow,
    build_header,
    codec_rule,
    read_header,
    tensor_bytes,
)

__all__ = ["ContainerReader", "codec_for", "decode", "encode", "read_entry", "write_container"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64}
_INT8_LEVELS = 127
_PIECE_BYTES = 2**19  # of what is decoded while it is read


def codec_for(tensor: Tensor, run_codec: str) -> str:
    """The codec that `tensor` travels with in a run."""
    if tensor.is_complex():
        raise ValueError(f"expected a real tensor, got {tensor.dtype}; split it into two")
    return codec_rule(tensor.ndim, run_codec, integer=not tensor.is_floating_point())


def encode(tensor: Tensor, codec: str) -> bytes:
    """The bytes of a tensor, exactly `tensor_bytes(codec, tensor.shape)` of them."""
    return b"".join(_encoded(tensor, codec))


def _encoded(tensor: Tensor, codec: str) -> list[memoryview]:
    """Views of the encoded bytes: large tensors go to disk without one more copy."""
    tensor_bytes(codec, tensor.shape)  # refuses an unknown codec and int8 of a vector
    tensor = tensor.detach().cpu()
    if codec == "int8":
        scales, values = _quantise(tensor.to(torch.float32))
        return [_view(scales), _view(values)]
    if codec == "i64" and tensor.is_floating_point():
        raise ValueError(f"expected an integer tensor for i64, got {tensor.dtype}")
    return [_view(tensor.to(_DTYPES[codec]))]


def _view(tensor: Tensor) -> memoryview:
    """Little-endian bytes; every platform that fedfit runs on is little-endian."""
    flat = tensor.reshape(-1)
    if flat.numel() <= 1 or not flat.is_contiguous():
        flat = flat.clone(memory_format=torch.contiguous_format)  # one element counts as contiguous with any stride
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [channels] and int8 values [channels, elements per channel]."""
    rows = tensor.reshape(tensor.shape[0], tensor[0].numel() if tensor.shape[0] else 0)
    if rows.numel() == 0:
        return torch.zeros(rows.shape[0]), rows.to(torch.int8)
    peaks = rows.abs().amax(dim=1)
    if not bool(torch.isfinite(peaks).all()):
        raise PayloadError("not_finite", f"a tensor of shape {tuple(tensor.shape)} has values that int8 cannot carry")
    scales = peaks / _INT8_LEVELS
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))  # below the smallest float: a row of zeros
    levels = torch.where(scales[:, None] > 0, rows / divisors[:, None], torch.zeros_like(rows))
    return scales, levels.round_().clamp_(-_INT8_LEVELS, _INT8_LEVELS).to(torch.int8)


def decode(data: bytes | bytearray | memoryview, codec: str, shape: Sequence[int]) -> Tensor:
    """The tensor of `data`: int64 for i64, float32 for every other codec; it shares no memory with `data`."""
    expected = tensor_bytes(codec, shape)
    if len(data) != expected:
        raise PayloadError("truncated", f"{codec} {list(shape)} has {len(data)} bytes, expected {expected}")
    # torch wants memory that it may write, and none of zero bytes
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if expected else torch.empty(0, dtype=torch.uint8)
    return _decoded(raw, codec, shape)


def _decoded(raw: Tensor, codec: str, shape: Sequence[int]) -> Tensor:
    """`raw` as values; for fp32 and i64 the same memory."""
    if codec == "int8":
        scales = raw[: 4 * shape[0]].view(torch.float32)
        values = raw[4 * shape[0] :].view(torch.int8).to(torch.float32).reshape(tuple(shape))
        return values.mul_(scales.reshape(-1, *[1] * (len(shape) - 1)))
    tensor = raw.view(_DTYPES[codec]).reshape(tuple(shape))
    return tensor if codec in ("fp32", "i64") else tensor.to(torch.float32)


def write_container(
    path: Path, meta: Mapping[str, Any], table: Sequence[TableRow], tensors: Iterable[Tensor]
) -> tuple[str, int]:
    """Write `tensors`, taken one by one in the order of `table`; returns the file's SHA-256 and length.

    The file is written plainly; `durable.publish` gives it a name that lasts.
    """
    digest = hashlib.sha256()
    head = build_header(meta, table)
    length = len(head)
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(head))
        digest.update(head)
        for (name, codec, shape), tensor in zip(table, tensors, strict=True):
            if tuple(tensor.shape) != tuple(shape):
                raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}, its table says {tuple(shape)}")
            for piece in _encoded(tensor, codec):
                _write_all(file.fileno(), piece)
                digest.update(piece)
                length += len(piece)
    return digest.hexdigest(), length


def _write_all(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]  # a signal or a nearly full disk may cut a write short


def read_entry(fd: int, data_offset: int, entry: Entry) -> Tensor:
    """One tensor of an open container, in hardly more memory than its own."""
    begin, codec, shape = data_offset + entry.offset, entry.codec, tuple(entry.shape)
    if codec in ("fp32", "i64") or entry.nbytes <= _PIECE_BYTES:
        return _decoded(_read(fd, begin, entry.nbytes, entry), codec, shape)
    tensor = torch.empty(shape)
    rows = tensor.reshape(shape[0], -1) if codec == "int8" else tensor.reshape(-1, 1)
    scales = _read(fd, begin, 4 * len(rows), entry).view(torch.float32)[:, None] if codec == "int8" else None
    begin += scales.nbytes if scales is not None else 0
    dtype = torch.int8 if codec == "int8" else _DTYPES[codec]
    for first in range(0, len(rows), step := max(1, _PIECE_BYTES // rows.shape[1])):
        part = rows[first : first + step]
        raw = _read(fd, begin, part.numel() * dtype.itemsize, entry)
        begin += len(raw)
        part.copy_(raw.view(dtype).reshape(part.shape))
        if scales is not None:
            part.mul_(scales[first : first + step])
    return tensor


def _read(fd: int, begin: int, num_bytes: int, entry: Entry) -> Tensor:
    raw = torch.empty(num_bytes, dtype=torch.uint8)
    view = raw.numpy().data
    while len(view):
        count = os.preadv(fd, [view], begin)
        if count == 0:
            raise PayloadError("truncated", f"the container ended inside the tensor {entry.name[:80]!r}")
        view = view[count:]
        begin += count
    return raw


class ContainerReader:
    """A container on disk whose tensors are read one at a time.

    with ContainerReader(path) as reader:
        weight = reader.tensor("model/conv1.weight")
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header = read_header(path)
        self._entries = {entry.name: entry for entry in self.header.entries}
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def names(self, prefix: str = "") -> list[str]:
        """Names that start with `prefix`, in the order of the file."""
        return [name for name in self._entries if name.startswith(prefix)]

    def entry(self, name: str) -> Entry:
        """Codec, shape and place of a tensor; raises `PayloadError` if the container lacks it."""
        if name not in self._entries:
            raise PayloadError("names", f"the container {self.path.name} has no tensor {name[:80]!r}")
        return self._entries[name]

    def tensor(self, name: str) -> Tensor:
        """Read and decode one tensor; the caller owns it."""
        return read_entry(self._fd, self.header.data_offset, self.entry(name))

    def close(self) -> None:
        """Give the file back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> ContainerReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
