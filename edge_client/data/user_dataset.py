"""What a task's own function returned, as a sample set: a map-style `Dataset`, or a pair of arrays (X, y).

Bytes (uint8) are scaled to [0, 1], other numbers become float32 as they are. Labels are integers or class names; a
`Dataset` with a list `classes` names its integers. Where it has `targets` they are believed, and compared with every
sample that is read; else all samples are read once to learn them. Every problem names the sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge_client.data.array_set import reshapes
from edge_client.data.arrays import Indices, Rows
from edge_client.data.labels import Labels, from_array
from edge_client.data.sample_set import Convert, Keys, SampleSet
from edge_client.errors import InputError
from edge_client.user_code import UserCode

__all__ = ["as_set"]

_EXPECTED = "image_folder(), csv(), npz(), a map-style Dataset, or arrays (X, y)"


def as_set(data: object, path: str, what: str) -> SampleSet:
    """`data`, returned by `what` in the task's file `path`, as a set; raises `InputError`."""
    where = f"{path}: {what}"
    if isinstance(data, SampleSet):
        return data
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(_is_array(item) for item in data):
        return _UserArrays(data[0], data[1], where)
    kinds = {kind.__name__ for kind in type(data).__mro__}
    if "DataLoader" in kinds:
        raise InputError(
            f"{where}: expected {_EXPECTED}, got a DataLoader; return its dataset, fedfit makes the batches"
        )
    if "IterableDataset" in kinds or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise InputError(f"{where}: expected {_EXPECTED}, got {type(data).__name__}, which has no length and index")
    if isinstance(data, (str, bytes, dict)) or _is_array(data):
        raise InputError(f"{where}: expected {_EXPECTED}, got {type(data).__name__}")
    return _UserDataset(data, path, what)


def _is_array(value: object) -> bool:
    return isinstance(value, (np.ndarray, torch.Tensor))


def _fits(stored: tuple[int, ...], shape: tuple[int, ...], where: str) -> None:
    if not reshapes(stored, shape):
        raise InputError(f"{where}: the model's input is {list(shape)}, the samples are {list(stored)}")


def _as_float(raw: NDArray[Any]) -> NDArray[np.float32]:
    """Samples as the model gets them; what float32 cannot hold becomes infinite, and is found then."""
    with np.errstate(over="ignore"):
        x: NDArray[np.float32] = raw.astype(np.float32)
    return x / np.float32(255) if raw.dtype == np.uint8 else x


def _unchanged(x: NDArray[Any]) -> NDArray[np.float32]:
    return x


def _plain(value: object, where: str) -> NDArray[Any]:
    """A tensor or an array as numbers in numpy; raises `InputError` for anything else."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        array: NDArray[Any] = value.numpy()
    elif isinstance(value, (np.ndarray, np.generic, int, float, list, tuple)):
        try:
            array = np.asarray(value)
        except ValueError as error:  # ragged lists
            raise InputError(f"{where}: expected a tensor or an array of numbers, got {error}") from error
    else:
        kind = type(value).__name__
        raise InputError(f"{where}: expected a tensor or an array of numbers, got {kind}; convert it in the Dataset")
    if array.dtype.kind not in "buif":
        raise InputError(f"{where}: expected numbers, got {array.dtype}")
    return array


class _UserArrays:
    """X [n, ...] and y [n], held by the user's code."""

    def __init__(self, x: Any, y: Any, where: str) -> None:
        self.where = where
        self.keys: Keys = {}
        self._x = _plain(x, f"{where}: X")
        if self._x.ndim < 2:
            raise InputError(f"{where}: X: expected [samples, ...], got shape {list(self._x.shape)}")
        labels = y.detach().cpu().numpy() if isinstance(y, torch.Tensor) else y
        if labels.shape[:1] != self._x.shape[:1]:
            raise InputError(f"{where}: expected a label for each of {len(self._x)} samples, got {list(labels.shape)}")
        self.labels = _labels(list(labels), where) if labels.dtype == object else from_array(labels, f"{where}: y")
        self.shape: tuple[int, ...] | None = self._x.shape[1:]
        self.held_bytes = 0 if isinstance(x, np.memmap) else self._x.nbytes  # clean pages of a file go by themselves

    def rows(self, indices: Indices, shape: tuple[int, ...]) -> tuple[Rows, Convert]:
        """Rows of X."""
        _fits(self._x.shape[1:], shape, self.where)
        return _ArrayRows(self._x, indices, self.where), _unchanged


class _ArrayRows:
    def __init__(self, x: NDArray[Any], chosen: Indices, where: str) -> None:
        self._x = x
        self._chosen = chosen
        self._where = where
        self.held_bytes = chosen.nbytes

    def take(self, indices: Indices) -> NDArray[Any]:
        x = _as_float(np.asarray(self._x[self._chosen[indices]]))
        _check_finite(x, self._chosen[indices], self._where)
        return x


def _check_finite(x: NDArray[np.float32], numbers: Indices, where: str) -> None:
    if not np.isfinite(x).all():
        bad = next(n for n, row in zip(numbers, x, strict=True) if not np.isfinite(row).all())
        raise InputError(f"{where}: sample {int(bad)} has values that are not finite")


class _UserDataset:
    """A map-style Dataset; it decodes what it returns, one sample at a time."""

    def __init__(self, data: Any, path: str, what: str) -> None:
        self.where = f"{path}: {what}"
        self.keys: Keys = {}
        self._what = what
        self._path = path
        self._data = data
        self.held_bytes = 0  # what it holds was measured when it was made
        with UserCode(path, f"{what}: len()"):
            self._length = len(data)
        first = self.sample(0)[0] if self._length else np.zeros(0)
        self.shape: tuple[int, ...] | None = first.shape
        self.labels = self._learn_labels()

    def sample(self, number: int) -> tuple[NDArray[Any], int | str]:
        """A sample and its label as the Dataset has them."""
        where = f"{self.where}: sample {number}"
        with UserCode(self._path, f"{self._what}: sample {number}"):
            pair = self._data[number]
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(f"{where}: expected (x, label), got {type(pair).__name__}")
        return _plain(pair[0], where), _label(pair[1], where)

    def _learn_labels(self) -> Labels:
        targets = self._targets()
        if targets is None:
            targets = [self._checked(number)[1] for number in range(self._length)]
        return _labels(targets, self.where, self._classes())

    def _checked(self, number: int) -> tuple[NDArray[Any], int | str]:
        x, label = self.sample(number)
        if x.shape != self.shape:
            raise InputError(f"{self.where}: sample {number} is {list(x.shape)}, sample 0 is {list(self.shape or ())}")
        return x, label

    def _targets(self) -> list[object] | None:
        """Labels that the Dataset keeps as a list; those of a `Subset` are in what it is a part of."""
        with UserCode(self._path, f"{self._what}: targets"):
            whole, indices = self._whole()
            targets: object = getattr(whole, "targets", None)
            if isinstance(targets, (np.ndarray, torch.Tensor)):
                targets = targets.tolist()
            if not isinstance(targets, (list, tuple)):
                return None
            listed = list(targets)
            if indices is not None:
                listed = [listed[int(index)] for index in indices]
        return listed if len(listed) == self._length else None

    def _classes(self) -> list[str] | None:
        classes = getattr(self._whole()[0], "classes", None)
        named = isinstance(classes, (list, tuple)) and classes and all(isinstance(name, str) for name in classes)
        return list(classes) if named and classes else None

    def _whole(self) -> tuple[object, Sequence[int] | None]:
        if hasattr(self._data, "dataset") and hasattr(self._data, "indices"):
            return self._data.dataset, self._data.indices
        return self._data, None

    def rows(self, indices: Indices, shape: tuple[int, ...]) -> tuple[Rows, Convert]:
        """Samples as they are asked for."""
        if self._length:
            _fits(self.shape or (), shape, self.where)
        return _DatasetRows(self, indices), _unchanged

    def read(self, number: int) -> NDArray[Any]:
        """The sample at `number`, if it is still what it was when the labels were learnt."""
        x, label = self._checked(number)
        names, expected = self.labels.names, int(self.labels.values[number])
        if label not in (expected, names[expected] if names is not None else expected):
            raise InputError(f"{self.where}: sample {number} has label {label!r}, its targets say {expected!r}")
        return x


class _DatasetRows:
    def __init__(self, data: _UserDataset, chosen: Indices) -> None:
        self._data = data
        self._chosen = chosen
        self.held_bytes = chosen.nbytes

    def take(self, indices: Indices) -> NDArray[Any]:
        numbers = self._chosen[indices]
        if not len(numbers):
            return np.zeros((0, *(self._data.shape or ())), dtype=np.float32)
        x = np.stack([_as_float(self._data.read(int(number))) for number in numbers])
        _check_finite(x, numbers, self._data.where)
        return x


def _label(value: object, where: str) -> int | str:
    """One label as an integer or a name."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and math.prod(value.shape) == 1:
        value = value.reshape(()).item()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise InputError(f"{where}: expected a label that is an integer or a class name, got {value!r:.40}")
    return value


def _labels(values: Sequence[object], where: str, classes: Sequence[str] | None = None) -> Labels:
    """Labels of all samples: integers, or names; not both."""
    plain = [_label(value, f"{where}: sample {number}") for number, value in enumerate(values)]
    odd = next((number for number, value in enumerate(plain) if type(value) is not type(plain[0])), None)
    if odd is not None:
        raise InputError(f"{where}: sample {odd} has label {plain[odd]!r}, sample 0 has {plain[0]!r}: numbers or names")
    if plain and isinstance(plain[0], str):
        return from_array(np.array(plain, dtype=np.str_), where)
    try:
        return from_array(np.array(plain, dtype=np.int64), where, classes)
    except OverflowError as error:
        raise InputError(f"{where}: a label is beyond 64 bits") from error
