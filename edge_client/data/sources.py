"""A device's own samples: from its `data` section to batches of tensors.

The way: find the arrays -> check all labels -> this device's part -> training and test samples -> read only those.
Images of bytes are scaled to [0, 1]; numbers in float arrays are taken as they are. A test set that belongs to a shared
data set is divided among the parts like the training set (IID), so that the devices together test each sample once.
The digits are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak; UCI Machine Learning
Repository, CC BY 4.0). Does not cover: names and syntax of the section, which `data.registry` checks without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_client.data import partitions, registry
from edge_client.data.arrays import ArrayFile, Indices, Rows
from edge_client.data.formats import idx_array, npz_arrays
from edge_client.errors import InputError
from edge_client.files import DataSection

__all__ = ["Samples", "open_data"]

_DIGITS = Path(__file__).with_name("digits.npz")
_DIGITS_LEVELS = 16.0  # grey levels of the digits, 0 to 16
_TEST_SPLIT = 0x7E57  # keeps the draw of a device's test samples apart from the partition's


class Samples:
    """Samples of one device, read batch by batch."""

    def __init__(self, rows: Rows, labels: Indices, shape: tuple[int, ...], convert: _Convert) -> None:
        self.labels: Tensor = torch.from_numpy(labels.copy())  # [n] int64
        self.held_bytes: int = rows.held_bytes + 8 * len(labels)
        self._rows = rows
        self._shape = shape
        self._convert = convert

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """x [b, *input shape] float32 and y [b] int64 of the samples at `indices`."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        x = self._convert(self._rows.take(chosen.numpy())).reshape(len(chosen), *self._shape)
        return torch.from_numpy(np.ascontiguousarray(x)), self.labels[chosen]

    def class_counts(self, num_classes: int) -> tuple[int, ...]:
        """Samples of each class."""
        return tuple(torch.bincount(self.labels, minlength=num_classes).tolist())


_Convert = Callable[[NDArray[Any]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class _Labelled:
    """A whole data set before this device's part is taken."""

    images: ArrayFile
    labels: Indices
    levels: float  # the largest value of integer images

    def pick(self, indices: Indices, shape: tuple[int, ...]) -> Samples:
        convert = _converter(self.images, shape, self.levels)
        return Samples(self.images.select(indices), self.labels[indices], shape, convert)


def open_data(section: DataSection, classes: Sequence[str], input_shape: Sequence[int]) -> tuple[Samples, Samples]:
    """This device's training and test samples, as the model's input; raises `InputError` naming file and problem."""
    registry.validate(section)
    train, test = _find(section, classes)
    shape = tuple(input_shape)
    part, num_parts = section.part
    mine = _part(train, section)
    if test is not None:
        shared = partitions.iid(test.labels, num_parts, section.seed)[part] if len(test.labels) else np.arange(0)
        return train.pick(mine, shape), test.pick(shared, shape)
    order = np.random.Generator(np.random.PCG64([section.seed, part, _TEST_SPLIT])).permutation(mine)
    num_test = int(len(mine) * section.test_fraction)
    return train.pick(np.sort(order[num_test:]), shape), train.pick(np.sort(order[:num_test]), shape)


def _part(data: _Labelled, section: DataSection) -> Indices:
    part, num_parts = section.part
    if num_parts == 1:
        return np.arange(len(data.labels))
    kind, alpha = registry.parse_partition(section.partition)
    if kind == "iid":
        return partitions.iid(data.labels, num_parts, section.seed)[part]
    return partitions.dirichlet(data.labels, num_parts, alpha, section.seed)[part]


def _find(section: DataSection, classes: Sequence[str]) -> tuple[_Labelled, _Labelled | None]:
    """Training data, and test data if the section or the files have any."""
    train_path, test_path = Path(section.train), Path(section.test)
    if section.source == "digits":
        return _npz(_DIGITS, ("x",), classes, levels=_DIGITS_LEVELS), None
    if section.source == "idx":
        train = _idx(train_path, "train", classes)
        if section.test:
            return train, _idx(test_path, "t10k", classes)
        has_test = train_path.is_dir() and _idx_file(train_path, "t10k", "images") is not None
        return train, _idx(train_path, "t10k", classes) if has_test else None
    train = _npz(train_path, ("x_train", "x"), classes)
    if section.test:
        return train, _npz(test_path, ("x_test", "x"), classes)
    return train, _npz(train_path, ("x_test",), classes) if "x_test" in npz_arrays(train_path) else None


def _npz(path: Path, names: Sequence[str], classes: Sequence[str], *, levels: float = 255.0) -> _Labelled:
    arrays = npz_arrays(path)
    name = next((name for name in names if name in arrays), names[0])
    label_name = "y" + name[1:]
    for needed in (name, label_name):
        if needed not in arrays:
            raise InputError(f"{path}: expected an array {needed!r}, got {', '.join(sorted(arrays)) or 'none'}")
    return _labelled(arrays[name], arrays[label_name], classes, levels)


def _idx(path: Path, prefix: str, classes: Sequence[str]) -> _Labelled:
    if path.is_dir():
        images, labels = _idx_file(path, prefix, "images"), _idx_file(path, prefix, "labels")
        for kind, found in (("images-idx3", images), ("labels-idx1", labels)):
            if found is None:
                raise InputError(f"{path}: expected a file {prefix}-{kind}-ubyte or {prefix}-{kind}-ubyte.gz, got none")
        assert images is not None
        assert labels is not None
    else:
        images = path
        labels = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
        if labels == images:
            raise InputError(f"{path}: expected a folder, or a file whose name has 'images', got neither")
    return _labelled(idx_array(images, num_axes=3), idx_array(labels, num_axes=1), classes, 255.0)


def _idx_file(folder: Path, prefix: str, kind: str) -> Path | None:
    axes = "idx3" if kind == "images" else "idx1"
    names = (f"{prefix}-{kind}{dot}{axes}-ubyte{gz}" for dot in "-." for gz in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _labelled(images: ArrayFile, labels: ArrayFile, classes: Sequence[str], levels: float) -> _Labelled:
    if len(labels.shape) != 1 or labels.shape[0] != images.shape[0]:
        raise InputError(
            f"{labels.path}: expected one label for each of {images.shape[0]} samples, got shape {labels.shape}"
        )
    return _Labelled(images, _check_labels(labels, labels.read_all(), classes), levels)


def _check_labels(file: ArrayFile, labels: NDArray[Any], classes: Sequence[str]) -> Indices:
    """Class numbers, or class names, as positions in the run's `classes`."""
    if labels.dtype.kind == "U":
        unknown = sorted(set(labels.tolist()) - set(classes))
        if unknown:
            raise InputError(f"{file.path}: {file.what}: no class {unknown[0]!r} in the run, only {', '.join(classes)}")
        position = {name: number for number, name in enumerate(classes)}
        return np.array([position[name] for name in labels.tolist()], dtype=np.int64)
    if labels.dtype.kind not in "iu":
        raise InputError(f"{file.path}: {file.what}: expected integer labels or class names, got {labels.dtype}")
    wrong = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(wrong):
        at = int(wrong[0])
        raise InputError(
            f"{file.path}: {file.what}: expected labels from 0 to {len(classes) - 1} ({len(classes)} classes), "
            f"got {labels[at]} at sample {at}"
        )
    return labels.astype(np.int64)


def _converter(file: ArrayFile, shape: tuple[int, ...], levels: float) -> _Convert:
    """From samples as they are stored to float32 in the model's axis order."""
    stored = file.shape[1:]
    channels_last = len(stored) == 3 and (stored[2], stored[0], stored[1]) == shape and stored != shape
    same = stored in (shape, shape[1:] if shape[:1] == (1,) else shape) or shape == (int(np.prod(stored)),)
    if not (same or channels_last):
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
