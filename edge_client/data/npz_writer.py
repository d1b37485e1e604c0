"""Writes npz files whose arrays are not compressed, block by block: what `formats` then reads in place.

Covers: arrays larger than memory; a reader sees the whole file or none. Does not cover: durability, as what is written
here can be made again.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client import durable

__all__ = ["NpzWriter"]


class NpzWriter:
    """An npz file that gets its name when all is written, and is taken away if something fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> NpzWriter:
        with durable.disk_errors(f"cannot write {self._path}"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._archive = zipfile.ZipFile(self._temporary, "w", zipfile.ZIP_STORED)
        return self

    def add(self, name: str, array: NDArray[Any]) -> None:
        """A whole array."""
        self.add_blocks(name, array.dtype, array.shape, [array])

    def add_blocks(
        self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], blocks: Iterable[NDArray[Any]]
    ) -> None:
        """An array in pieces along its first axis."""
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        count = 0
        with (
            durable.disk_errors(f"cannot write {self._path}"),
            self._archive.open(f"{name}.npy", "w", force_zip64=True) as file,
        ):
            np.lib.format.write_array_header_1_0(file, header)
            for block in blocks:
                file.write(np.ascontiguousarray(block, dtype=dtype).tobytes())
                count += len(block)
        if count != shape[0]:
            raise ValueError(f"array {name!r} was to have {shape[0]} rows, got {count}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with durable.disk_errors(f"cannot write {self._path}"):
                self._archive.close()
                if kind is None:
                    os.replace(self._temporary, self._path)
        finally:
            self._temporary.unlink(missing_ok=True)
