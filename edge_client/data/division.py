"""The parts of a shared data set: computed as its partition says, or read from a file that somebody has made.

    a partition file is an npz file with the array `train`, and `test` if the test set is divided, too: the number of
    the part of each sample

Covers: training and test sets, keys, the file. Does not cover: the arithmetic (`partitions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.data import partitions, registry
from edge_client.data.arrays import Indices
from edge_client.data.formats import npz_arrays
from edge_client.data.npz_writer import NpzWriter
from edge_client.data.registry import Partition
from edge_client.data.sample_set import SampleSet, find_key
from edge_client.errors import InputError

__all__ = ["divide_test", "divide_train", "write_parts"]

_NOBODY = -1  # in a partition file: a sample that no device has


def divide_train(data: SampleSet, labels: Indices, partition: str, num_parts: int, seed: int) -> list[Indices]:
    """The training samples of each part, ascending, none empty; raises `InputError` for what cannot be divided so."""
    division = registry.parse_partition(partition)
    if num_parts == 1:
        return [np.arange(len(labels))]
    if division.kind == "file":
        return _read(Path(division.name), "train", len(labels), num_parts)
    keys = _keys(data, division) if division.kind == "key" else None
    return partitions.make(division, labels, keys, num_parts, seed)


def divide_test(
    train: SampleSet, parts: Sequence[Indices], test: SampleSet, labels: Indices, partition: str, seed: int
) -> list[Indices]:
    """The shares of a test set that belongs to a shared data set: the devices together test each sample once.

    By key, if the training set is divided so and has the keys of the test set; as a file says, if it does; else IID.
    """
    division = registry.parse_partition(partition)
    if len(parts) == 1:
        return [np.arange(len(labels))]
    if division.kind == "file" and "test" in npz_arrays(Path(division.name)):
        return _read(Path(division.name), "test", len(labels), len(parts))
    if division.kind == "key" and test.keys:
        train_keys, test_keys = _keys(train, division), _keys(test, division)
        if np.isin(test_keys, train_keys).all():  # otherwise other people test than train: everybody gets some of all
            return [np.flatnonzero(np.isin(test_keys, train_keys[part])) for part in parts]
    return partitions.iid(labels, len(parts), seed, min_size=0)


def _keys(data: SampleSet, partition: Partition) -> NDArray[Any]:
    return data.keys[find_key(data.keys, partition.name, data.where)]()


def _read(path: Path, which: str, num_samples: int, num_parts: int) -> list[Indices]:
    arrays = npz_arrays(path)
    if which not in arrays:
        raise InputError(f"{path}: expected an array {which!r}, got {', '.join(sorted(arrays)) or 'none'}")
    file = arrays[which]
    if file.shape != (num_samples,) or file.dtype.kind not in "iu":
        raise InputError(
            f"{file.where}: expected the part of each of {num_samples} samples, got {file.dtype} {list(file.shape)}"
        )
    owner = file.read_all()
    wrong = np.flatnonzero((owner < _NOBODY) | (owner >= num_parts))
    if len(wrong):
        raise InputError(
            f"{file.where}: expected parts from 0 to {num_parts - 1}, or {_NOBODY} for nobody, "
            f"got {owner[wrong[0]]} at sample {wrong[0]}"
        )
    owned = np.flatnonzero(owner != _NOBODY)
    parts = [owned[part] for part in partitions.parts_of(owner[owned].astype(np.int64), num_parts)]
    empty = [number for number, part in enumerate(parts) if not len(part)]
    if which == "train" and empty:
        raise InputError(f"{file.where}: none of {num_samples} samples belongs to part {empty[0]} of {num_parts}")
    return parts


def write_parts(path: Path, train: Sequence[Indices], test: Sequence[Indices] | None, *, num_nobodys: int = 0) -> None:
    """Keep a division as a partition file; `num_nobodys` training samples are in none of the parts."""
    with NpzWriter(path) as file:
        file.add("train", _owners(train, num_nobodys))
        if test is not None:
            file.add("test", _owners(test))


def _owners(parts: Sequence[Indices], num_nobodys: int = 0) -> NDArray[np.int32]:
    owner = np.full(sum(map(len, parts)) + num_nobodys, _NOBODY, dtype=np.int32)
    for number, part in enumerate(parts):
        owner[part] = number
    return owner
