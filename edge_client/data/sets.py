"""Whole data sets, before a device's part is taken and before their labels are those of a run.

    npz(path)            arrays x and y in one file             csv(path)    a table of numbers with a column of labels
    image_folder(path)   one folder of image files per class

Each is opened and checked from end to end when it is made, and read sample by sample later: none is held in memory
unless its file is compressed. `given` makes the same of what a user's own function returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edge_client.data.arrays import ArrayFile, Indices, Rows
from edge_client.data.formats import npz_arrays
from edge_client.data.labels import Labels, from_array
from edge_client.errors import InputError

__all__ = ["ArraySet", "Convert", "SampleSet", "csv", "image_folder", "npz", "reshapes"]

Convert = Callable[[NDArray[Any]], NDArray[np.float32]]

_MAX_CLASSES = 65_536


@runtime_checkable
class SampleSet(Protocol):
    """Samples with their labels."""

    where: str  # for messages
    labels: Labels
    shape: tuple[int, ...] | None  # of one sample; None: whatever the model wants
    held_bytes: int  # what the whole set keeps in memory, however many parts are taken of it

    def rows(self, indices: Indices, shape: tuple[int, ...]) -> tuple[Rows, Convert]:
        """The samples at `indices`, and what makes float32 of `shape` of them; raises `InputError` if nothing can."""


def npz(path: str | Path, *, test: bool = False, shape: Sequence[int] | None = None) -> SampleSet:
    """Arrays `x` and `y` of an npz file, or `x_train` and `y_train`; with `test` those of the test set.

    Bytes are scaled to [0, 1]. Labels are class names, or numbers with the names in an array `classes`, or positions
    in the run's classes. `shape` is that of a sample, if not the file's.
    """
    return open_npz(Path(path), ("x_test", "x") if test else ("x_train", "x"), shape=shape)


def csv(path: str | Path, *, shape: Sequence[int] | None = None) -> SampleSet:
    """A CSV file: a header line, then numbers; the labels are in the column `label`, or else in the last one."""
    from edge_client.data.tables import CsvSet

    return CsvSet(Path(path), tuple(shape) if shape is not None else None)


def image_folder(path: str | Path, size: int | tuple[int, int] | None = 96, *, channels: int = 3) -> SampleSet:
    """One folder of image files per class, named as the class; resized to `size` (or height, width), in [0, 1]."""
    from edge_client.data.images import ImageSet

    if size is None:
        return ImageSet(Path(path), None)
    height, width = (size, size) if isinstance(size, int) else size
    return ImageSet(Path(path), (channels, height, width))


def open_npz(
    path: Path, names: Sequence[str], *, levels: float = 255.0, shape: Sequence[int] | None = None
) -> SampleSet:
    """The first of the arrays `names` with its labels; `levels` is the largest value of bytes."""
    arrays = npz_arrays(path)
    name = next((name for name in names if name in arrays), names[0])
    label_name = "y" + name[1:]
    for needed in (name, label_name):
        if needed not in arrays:
            raise InputError(f"{path}: expected an array {needed!r}, got {', '.join(sorted(arrays)) or 'none'}")
    return ArraySet(arrays[name], arrays[label_name], levels=levels, names=arrays.get("classes"), shape=shape)


class ArraySet:
    """Samples in one array of a file, labels in another."""

    def __init__(
        self,
        images: ArrayFile,
        labels: ArrayFile,
        *,
        levels: float,
        names: ArrayFile | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        self.where = f"{labels.path}: {labels.what}"
        self.held_bytes = 0
        self.shape: tuple[int, ...] | None = tuple(shape) if shape is not None else images.shape[1:]
        self._images = images
        self._levels = levels
        if len(labels.shape) != 1 or labels.shape[0] != images.shape[0]:
            raise InputError(
                f"{labels.path}: expected one label for each of {images.shape[0]} samples, got shape {labels.shape}"
            )
        self.labels = from_array(labels.read_all(), self.where, _names(names))

    def rows(self, indices: Indices, shape: tuple[int, ...]) -> tuple[Rows, Convert]:
        """Read from the file, or from what was unpacked of it."""
        convert = _converter(self._images, shape, self._levels)
        rows = self._images.select(indices)
        return (_FiniteRows(rows, indices, self._images) if self._images.dtype.kind == "f" else rows), convert


class _FiniteRows:
    """Rows of numbers that a model can learn from: one NaN would spoil it without a sound."""

    def __init__(self, rows: Rows, chosen: Indices, file: ArrayFile) -> None:
        self._rows = rows
        self._chosen = chosen
        self._file = file
        self.held_bytes = rows.held_bytes

    def take(self, indices: Indices) -> NDArray[Any]:
        raw = self._rows.take(indices)
        with np.errstate(over="ignore"):
            fine = np.isfinite(raw.astype(np.float32, copy=False)).reshape(len(raw), -1).all(axis=1)
        if not fine.all():
            number = int(self._chosen[indices][np.flatnonzero(~fine)[0]])
            raise InputError(f"{self._file.path}: {self._file.what}: sample {number} has values that are not finite")
        return raw


def _names(file: ArrayFile | None) -> list[str] | None:
    if file is None:
        return None
    if len(file.shape) != 1 or file.dtype.kind != "U" or not 0 < file.shape[0] <= _MAX_CLASSES:
        raise InputError(f"{file.path}: {file.what}: expected a list of class names, got {file.dtype} {file.shape}")
    return [str(name) for name in file.read_all()]


def reshapes(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether samples are of `shape` as they are: with or without a channel axis of one, or flat."""
    return shape in (stored, (1, *stored), (math.prod(stored),))


def _converter(file: ArrayFile, shape: tuple[int, ...], levels: float) -> Convert:
    """From samples as they are stored to float32 in the model's axis order."""
    stored = file.shape[1:]
    channels_last = len(stored) == 3 and (stored[2], stored[0], stored[1]) == shape and stored != shape
    if not (reshapes(stored, shape) or channels_last):
        raise InputError(
            f"{file.path}: {file.what}: the model's input is {list(shape)}, the samples are {list(stored)}; "
            "change model.input in the run, or the data"
        )
    if file.dtype.kind not in "uf" or (file.dtype.kind == "u" and file.dtype.itemsize != 1):
        raise InputError(f"{file.path}: {file.what}: expected samples of uint8 or float, got {file.dtype}")
    divisor = np.float32(levels if file.dtype.kind == "u" else 1.0)

    def convert(raw: NDArray[Any]) -> NDArray[np.float32]:
        x = raw.astype(np.float32) / divisor
        return x.transpose(0, 3, 1, 2) if channels_last else x

    return convert
