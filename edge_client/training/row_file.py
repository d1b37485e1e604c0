"""Activations on disk: rows of equal size by position, read and written a batch at a time.

With `pread` and `pwrite`: the pages of a mapping would count as this process's memory.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from edge_client import durable, faults
from edge_client.errors import MachineError

__all__ = ["RowFile", "layout_of"]


def layout_of(rows: Tensor) -> torch.memory_format:
    """Channels last for images in that layout, else the usual one."""
    last = rows.ndim == 4 and not rows.is_contiguous() and rows.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


class RowFile:
    """Rows of equal size by position, in a file without a name: nothing is left of it, however the process ends."""

    def __init__(self, folder: Path) -> None:
        self._purpose = f"keeping activations in {folder}"
        with durable.disk_errors(self._purpose):
            self._fd, path = tempfile.mkstemp(dir=folder)
            os.unlink(path)
        self._like = torch.empty(0)

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free its space on disk; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def write(self, positions: Tensor, rows: Tensor) -> None:
        """Put one row at each position; they may come from another device."""
        rows = rows.cpu()
        self._like = torch.empty_like(rows[:1], memory_format=torch.preserve_format)
        views, row_bytes = _bytes_of(_in_memory_order(rows).contiguous())
        with durable.disk_errors(self._purpose):
            faults.point("worker.train.buffer")
            for position, view in zip(positions.tolist(), views, strict=True):
                _write_all(self._fd, view, position * row_bytes)

    def read(self, positions: Tensor) -> Tensor:
        """The rows at these positions, in the layout in which they were computed."""
        shape = (len(positions), *self._like.shape[1:])
        rows = torch.empty(shape, dtype=self._like.dtype, memory_format=layout_of(self._like))
        views, row_bytes = _bytes_of(_in_memory_order(rows))
        with durable.disk_errors(self._purpose):
            for position, view in zip(positions.tolist(), views, strict=True):
                _read_all(self._fd, view, position * row_bytes)
        return rows


def _in_memory_order(rows: Tensor) -> Tensor:
    """The same memory, with the axes in the order in which it is laid out."""
    return rows.permute(0, 2, 3, 1) if layout_of(rows) == torch.channels_last else rows


def _bytes_of(rows: Tensor) -> tuple[list[memoryview], int]:
    """The memory of each row of a contiguous tensor, and their size."""
    flat = rows.reshape(len(rows), -1).view(torch.uint8)
    return [flat[index].numpy().data for index in range(len(flat))], flat.shape[1]


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(fd, data, offset)  # a signal or a nearly full disk may cut a write short
        data, offset = data[count:], offset + count


def _read_all(fd: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.preadv(fd, [data], offset)
        if count == 0:
            raise MachineError(f"the file of activations ended at {offset}, it was written further; check the disk")
        data, offset = data[count:], offset + count
