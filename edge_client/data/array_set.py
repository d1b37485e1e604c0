"""Samples in arrays on disk, such as those of an npz file, as a sample set.

Does not cover: how arrays are read (`arrays`, `formats`), forms of an npz file that pack better (`npz_samples`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.data.arrays import ArrayFile, Indices, Rows, Stored
from edge_client.data.formats import npz_arrays
from edge_client.data.labels import Labels, from_array
from edge_client.data.npz_samples import samples_in
from edge_client.data.sample_set import Convert, Keys, SampleSet
from edge_client.errors import InputError

__all__ = ["ArraySet", "has_samples", "labels_of", "open_npz", "reshapes"]

_MAX_CLASSES = 65_536


def open_npz(
    path: Path,
    endings: Sequence[str],
    *,
    levels: float = 255.0,
    shape: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> SampleSet:
    """The arrays `x` and `y` with the first of `endings` that is there; `levels` is the largest value of bytes."""
    arrays = npz_arrays(path)
    candidates = ((ending, samples_in(arrays, ending)) for ending in endings)
    ending, samples = next((pair for pair in candidates if pair[1] is not None), ("", None))
    labels_name = f"y{ending}" if samples is not None else f"x{endings[0]}"
    if samples is None or labels_name not in arrays:
        raise InputError(f"{path}: expected an array {labels_name!r}, got {', '.join(sorted(arrays)) or 'none'}")
    keys = {name.removesuffix(ending): array for name, array in arrays.items() if _is_key(name, ending, array, samples)}
    class_names = names if names is not None else _names(arrays.get("classes"))
    labels = labels_of(arrays[labels_name], samples.shape[0], class_names)
    return ArraySet(samples, labels, where=arrays[labels_name].where, levels=levels, shape=shape, keys=keys)


def has_samples(path: Path, ending: str) -> bool:
    """Whether an npz file has samples with that ending."""
    return samples_in(npz_arrays(path), ending) is not None


def _is_key(name: str, ending: str, array: ArrayFile, samples: Stored) -> bool:
    """Whether an array has one number or text for each sample, and is neither samples nor labels."""
    fits = array.shape == samples.shape[:1] and array.dtype.kind in "iuU"
    return fits and name.endswith(ending) and name.removesuffix(ending) not in ("x", "y", "classes", "")


def labels_of(file: ArrayFile, num_samples: int, names: Sequence[str] | None) -> Labels:
    """The labels in an array; `names` are what its numbers mean."""
    if len(file.shape) != 1 or file.shape[0] != num_samples:
        raise InputError(f"{file.path}: expected one label for each of {num_samples} samples, got shape {file.shape}")
    return from_array(file.read_all(), file.where, names)


class ArraySet:
    """Samples in an array on disk."""

    def __init__(
        self,
        samples: Stored,
        labels: Labels,
        *,
        where: str,
        levels: float = 255.0,
        shape: Sequence[int] | None = None,
        keys: Mapping[str, ArrayFile] | None = None,
    ) -> None:
        self.where = where
        self.labels = labels
        self.levels = levels  # the largest value of bytes
        self.held_bytes = 0
        self.shape: tuple[int, ...] | None = tuple(shape) if shape is not None else samples.shape[1:]
        self.keys: Keys = {name: array.read_all for name, array in (keys or {}).items()}
        self._samples = samples

    def rows(self, indices: Indices, shape: tuple[int, ...]) -> tuple[Rows, Convert]:
        """Read from the file, or from what was unpacked of it."""
        convert = _converter(self._samples, shape, self.levels)
        rows = self._samples.select(indices)
        return (_FiniteRows(rows, indices, self._samples) if self._samples.dtype.kind == "f" else rows), convert


class _FiniteRows:
    """Rows without NaN and infinity: one of them would silently spoil the model."""

    def __init__(self, rows: Rows, chosen: Indices, samples: Stored) -> None:
        self._rows = rows
        self._chosen = chosen
        self._samples = samples
        self.held_bytes = rows.held_bytes

    def take(self, indices: Indices) -> NDArray[Any]:
        raw = self._rows.take(indices)
        with np.errstate(over="ignore"):
            fine = np.isfinite(raw.astype(np.float32, copy=False)).all(axis=tuple(range(1, raw.ndim)))
        if not fine.all():
            number = int(self._chosen[indices][np.flatnonzero(~fine)[0]])
            raise InputError(f"{self._samples.where}: sample {number} has values that are not finite")
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


def _converter(samples: Stored, shape: tuple[int, ...], levels: float) -> Convert:
    """From samples as they are stored to float32 in the model's axis order."""
    stored = samples.shape[1:]
    channels_last = len(stored) in (2, 3) and (stored[-1], *stored[:-1]) == shape and stored != shape
    if not (reshapes(stored, shape) or channels_last):
        raise InputError(
            f"{samples.where}: the model's input is {list(shape)}, the samples are {list(stored)}; "
            "change model.input in the run, or the data"
        )
    if samples.dtype.kind not in "uf" or (samples.dtype.kind == "u" and samples.dtype.itemsize != 1):
        raise InputError(f"{samples.where}: expected samples of uint8 or float, got {samples.dtype}")
    divisor = np.float32(levels if samples.dtype.kind == "u" else 1.0)

    def convert(raw: NDArray[Any]) -> NDArray[np.float32]:
        x = raw.astype(np.float32) / divisor
        return np.moveaxis(x, -1, 1) if channels_last else x

    return convert
