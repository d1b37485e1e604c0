"""A device's own samples: from its `data` section, or from a task's functions, to batches of tensors.

The way: open the sets -> map all labels to the run's classes -> this device's part -> training and test samples -> read
only those. A test set that belongs to a shared data set is divided among the parts like the training set (IID), so that
the devices together test each sample once.
The digits are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak; UCI Machine Learning
Repository, CC BY 4.0). Does not cover: names and syntax of the section, which `data.registry` checks without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from edge_client import durable
from edge_client.data import partitions, registry
from edge_client.data.arrays import Indices, Rows
from edge_client.data.formats import idx_array, npz_arrays
from edge_client.data.images import ImageSet
from edge_client.data.labels import positions
from edge_client.data.sets import ArraySet, Convert, SampleSet, csv, open_npz
from edge_client.errors import InputError, MachineError
from edge_client.files import DataSection

__all__ = ["Samples", "all_samples", "divide", "open_data"]

_DIGITS = Path(__file__).with_name("digits.npz")
_DIGITS_LEVELS = 16.0  # grey levels of the digits, 0 to 16
_TEST_SPLIT = 0x7E57  # keeps the draw of a device's test samples apart from the partition's


class Samples:
    """Samples of one device, read batch by batch."""

    def __init__(self, rows: Rows, labels: Indices, shape: tuple[int, ...], convert: Convert) -> None:
        self.labels: Tensor = torch.from_numpy(labels.copy())  # [n] int64
        self.held_bytes: int = rows.held_bytes + 8 * len(labels)
        self.shape = shape  # of one sample
        self._rows = rows
        self._convert = convert

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """x [b, *input shape] float32 and y [b] int64 of the samples at `indices`."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        x = self._convert(self._rows.take(chosen.numpy())).reshape(len(chosen), *self.shape)
        return torch.from_numpy(np.ascontiguousarray(x)), self.labels[chosen]

    def class_counts(self, num_classes: int) -> tuple[int, ...]:
        """Samples of each class."""
        return tuple(torch.bincount(self.labels, minlength=num_classes).tolist())


def open_data(
    section: DataSection,
    classes: Sequence[str],
    input_shape: Sequence[int],
    rename: Mapping[str, str] | None = None,
) -> tuple[Samples, Samples]:
    """This device's training and test samples, as the model's input; raises `InputError` naming file and problem."""
    registry.validate(section)
    shape = tuple(input_shape)
    return divide(*_find(section, shape), section, classes, shape, rename or {})


def divide(
    train: SampleSet,
    test: SampleSet | None,
    section: DataSection,
    classes: Sequence[str],
    input_shape: tuple[int, ...] | None,
    rename: Mapping[str, str],
) -> tuple[Samples, Samples]:
    """This device's part of its sets, for samples of `input_shape` or else of their own shape."""
    shape = _shape(train, input_shape)
    labels = positions(train.labels, classes, rename, train.where)
    mine = _part(labels, section)
    part, num_parts = section.part
    if test is not None:
        test_labels = positions(test.labels, classes, rename, test.where)
        shared = partitions.iid(test_labels, num_parts, section.seed)[part] if len(test_labels) else np.arange(0)
        samples = _pick(train, labels, mine, shape), _pick(test, test_labels, shared, shape)
        samples[1].held_bytes += test.held_bytes
    else:
        order = np.random.Generator(np.random.PCG64([section.seed, part, _TEST_SPLIT])).permutation(mine)
        num_test = int(len(mine) * section.test_fraction)
        samples = (
            _pick(train, labels, np.sort(order[num_test:]), shape),
            _pick(train, labels, np.sort(order[:num_test]), shape),
        )
    samples[0].held_bytes += train.held_bytes
    return samples


def all_samples(data: SampleSet, classes: Sequence[str], input_shape: tuple[int, ...] | None) -> Samples:
    """A whole set, as the server tests on it."""
    labels = positions(data.labels, classes, {}, data.where)
    return _pick(data, labels, np.arange(len(labels)), _shape(data, input_shape))


def _shape(data: SampleSet, input_shape: tuple[int, ...] | None) -> tuple[int, ...]:
    shape = data.shape if input_shape is None else input_shape
    if shape is None:
        raise InputError(f"{data.where}: how large is a sample? give a size, or Task(input=(3, 96, 96))")
    return shape


def _pick(data: SampleSet, labels: Indices, indices: Indices, shape: tuple[int, ...]) -> Samples:
    rows, convert = data.rows(indices, shape)
    return Samples(rows, labels[indices], shape, convert)


def _part(labels: Indices, section: DataSection) -> Indices:
    part, num_parts = section.part
    if num_parts == 1:
        return np.arange(len(labels))
    kind, alpha = registry.parse_partition(section.partition)
    if kind == "iid":
        return partitions.iid(labels, num_parts, section.seed)[part]
    return partitions.dirichlet(labels, num_parts, alpha, section.seed)[part]


def _find(section: DataSection, shape: tuple[int, ...]) -> tuple[SampleSet, SampleSet | None]:
    """Training data, and test data if the section or the files have any."""
    train_path, test_path = Path(section.train), Path(section.test)
    if section.source == "digits":
        return open_npz(_DIGITS, ("x",), levels=_DIGITS_LEVELS), None
    for key, path in (("train", section.train), ("test", section.test)):
        try:
            there = not path or durable.is_there(Path(path))
        except MachineError as error:
            raise InputError(f"data.{key}: {error}") from error
        if not there:
            raise InputError(f"data.{key}: {path} does not exist on this device; correct it in device.toml")
    if section.source == "image-folder":
        return ImageSet(train_path, shape), ImageSet(test_path, shape) if section.test else None
    if section.source == "csv":
        return csv(train_path), csv(test_path) if section.test else None
    if section.source == "idx":
        train = _idx(train_path, "train")
        if section.test:
            return train, _idx(test_path, "t10k")
        has_test = train_path.is_dir() and _idx_file(train_path, "t10k", "images") is not None
        return train, _idx(train_path, "t10k") if has_test else None
    train = open_npz(train_path, ("x_train", "x"))
    if section.test:
        return train, open_npz(test_path, ("x_test", "x"))
    return train, open_npz(train_path, ("x_test",)) if "x_test" in npz_arrays(train_path) else None


def _idx(path: Path, prefix: str) -> SampleSet:
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
    return ArraySet(idx_array(images, num_axes=3), idx_array(labels, num_axes=1), levels=255.0)


def _idx_file(folder: Path, prefix: str, kind: str) -> Path | None:
    axes = "idx3" if kind == "images" else "idx1"
    names = (f"{prefix}-{kind}{dot}{axes}-ubyte{gz}" for dot in "-." for gz in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)
