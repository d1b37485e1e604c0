"""A device's own samples: from its `data` section, or from a task's functions, to batches of tensors.

The way: open the sets -> map all labels to the run's classes -> this device's part -> training and test samples -> read
only those. A test set that belongs to a shared data set is divided among the parts, too (IID, by key as the
training set, or as a partition file says), so that the devices together test each sample once.
Does not cover: which files a source means (`openers`), names and syntax of the section, which `registry` checks without
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from edge_client import durable
from edge_client.config.device_file import DataSection
from edge_client.data import registry
from edge_client.data.arrays import Indices, Rows
from edge_client.data.division import divide_test, divide_train
from edge_client.data.labels import positions
from edge_client.data.openers import open_test, open_train
from edge_client.data.sample_set import Convert, SampleSet
from edge_client.errors import InputError, MachineError

__all__ = ["Samples", "all_samples", "divide", "open_data"]

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
        positions = torch.as_tensor(indices, dtype=torch.int64)
        x = self._convert(self._rows.take(positions.numpy())).reshape(len(positions), *self.shape)
        return torch.from_numpy(np.ascontiguousarray(x)), self.labels[positions]

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
    section = registry.located(section)
    shape = tuple(input_shape)
    return divide(*_open(section, shape), section, classes, shape, rename or {})


def divide(
    train: SampleSet,
    test: SampleSet | None,
    section: DataSection,
    classes: Sequence[str],
    input_shape: tuple[int, ...] | None,
    rename: Mapping[str, str],
) -> tuple[Samples, Samples]:
    """This device's part of its sets, for samples of `input_shape`, or else of the shape that they have."""
    shape = _shape(train, input_shape)
    labels = positions(train.labels, classes, rename, train.where)
    part, num_parts = section.part
    parts = divide_train(train, labels, section.partition, num_parts, section.seed)
    part_rows = parts[part]
    if test is not None:
        test_labels = positions(test.labels, classes, rename, test.where)
        test_rows = divide_test(train, parts, test, test_labels, section.partition, section.seed)[part]
        samples = _pick(train, labels, part_rows, shape), _pick(test, test_labels, test_rows, shape)
        samples[1].held_bytes += test.held_bytes
    else:
        order = np.random.Generator(np.random.PCG64([section.seed, part, _TEST_SPLIT])).permutation(part_rows)
        num_test = int(len(part_rows) * section.test_fraction)
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


def _open(section: DataSection, shape: tuple[int, ...]) -> tuple[SampleSet, SampleSet | None]:
    """Training data, and test data if the section or the files have any."""
    kind = section.source
    for name, path in (("train", section.train), ("test", section.test)):
        try:
            exists = not path or durable.is_there(Path(path))
        except MachineError as error:
            raise InputError(f"data.{name}: {error}") from error
        if not exists:
            raise InputError(f"data.{name}: {path} does not exist on this device; correct it in device.toml")
    partition = registry.parse_partition(section.partition)
    key = partition.name if partition.kind == "key" else None
    train = open_train(kind, Path(section.train), key=key, shape=shape)
    test_path = Path(section.test or section.train)
    return train, open_test(kind, test_path, inside=not section.test, key=key, shape=shape)
