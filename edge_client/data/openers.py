"""Data by its name: `digits`, `npz:/data/a.npz`, `cifar10:/data/cifar-10-batches-bin`, opened and described.

Covers: which files a name means, what classes and shape the samples have, whether there is a test set. The digits are
the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak; UCI Machine Learning Repository,
CC BY 4.0). Does not cover: the syntax (`registry`), a device's part (`sources`). Needs numpy, not torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from edge_client import durable
from edge_client.data import registry
from edge_client.data.array_set import ArraySet, has_samples, labels_of, open_npz
from edge_client.data.cifar import open_cifar
from edge_client.data.formats import idx_array
from edge_client.data.images import ImageSet
from edge_client.data.labels import Labels, positions
from edge_client.data.sample_set import SampleSet, find_key
from edge_client.data.sets import csv
from edge_client.errors import InputError, MachineError

__all__ = [
    "TEST_NAMES",
    "TRAIN_NAMES",
    "DataFacts",
    "class_names",
    "describe_data",
    "image_folders",
    "input_shape",
    "open_both",
    "open_even_empty",
    "open_named",
    "open_test",
    "open_train",
]

_DIGITS = Path(__file__).with_name("digits.npz")
_DIGITS_LEVELS = 16.0  # grey levels of the digits, 0 to 16
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_HAR = ("walking", "walking-upstairs", "walking-downstairs", "sitting", "standing", "laying")
_MAX_CLASSES = 65_536
TRAIN_NAMES, TEST_NAMES = ("train", "training"), ("test", "testing", "val", "valid", "validation")


class DataFacts(NamedTuple):
    """What a simulation has to know of a data set before it begins."""

    shape: tuple[int, ...] | None  # of a sample, as a model's input; None: as the model wants it (image folders)
    classes: tuple[str, ...]  # in the order of the labels
    num_train: int
    num_test: int  # 0: there is no test set


def describe_data(text: str, *, partition: str = "") -> DataFacts:
    """Open the data of that name, check its labels, and tell what it is; `partition` may name a key (CSV column)."""
    train, test = open_both(text, partition)
    classes = class_names(train.labels, train.where)
    num_test = len(positions(test.labels, classes, {}, test.where)) if test is not None else 0
    return DataFacts(input_shape(train.shape), classes, len(train.labels.values), num_test)


def open_named(
    text: str, classes: Sequence[str] | None = None, *, test: bool = False, partition: str = ""
) -> SampleSet:
    """The training or test set of that name; its labels are positions in `classes`, or else in those of `DataFacts`."""
    train, tests = open_both(text, partition)
    samples = tests if test else train
    if samples is None:
        raise InputError(f"data {text!r} has no test set; name one, or keep a fraction of the training data for tests")
    order = tuple(classes) if classes is not None else class_names(train.labels, train.where)
    samples.labels = Labels(values=positions(samples.labels, order, {}, samples.where), names=order)
    return samples


def open_both(text: str, partition: str, shape: tuple[int, ...] | None = None) -> tuple[SampleSet, SampleSet | None]:
    """The training set of that name, and its test set if it has one; a key that `partition` names must be there."""
    division = registry.parse_partition(partition)
    key = division.name if division.kind == "key" else None
    train = open_even_empty(text, key=key, shape=shape)
    if not len(train.labels.values):
        raise InputError(f"{train.where}: expected training samples, got none")
    if key is not None:
        find_key(train.keys, key, train.where)
    kind, place = registry.split_source(text)
    return train, open_test(kind, Path(place), inside=True)


def open_even_empty(text: str, *, key: str | None = None, shape: tuple[int, ...] | None = None) -> SampleSet:
    """The training set of that name, for those who can do without samples."""
    kind, place = registry.split_source(text)
    return open_train(kind, _existing_path(Path(place), f"data {text!r}"), key=key, shape=shape)


def _existing_path(path: Path, what: str) -> Path:
    try:
        if not durable.is_there(path):
            raise InputError(f"{what}: {path} does not exist")
    except MachineError as error:
        raise InputError(f"{what}: {error}") from error
    return path


def class_names(labels: Labels, where: str) -> tuple[str, ...]:
    """The names of the labels; numbers are their own names."""
    if labels.names is not None:
        numbers = labels.text and all(name.isascii() and name.isdecimal() for name in labels.names)
        return tuple(sorted(labels.names, key=lambda name: (int(name), name))) if numbers else labels.names
    low, high = int(labels.values.min(initial=0)), int(labels.values.max(initial=0))
    if low < 0 or high >= _MAX_CLASSES:
        raise InputError(f"{where}: expected labels from 0 to {_MAX_CLASSES - 1}, got {low} to {high}")
    return tuple(str(number) for number in range(high + 1))


def input_shape(stored: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """As models want it: a grey image and a window get a channel, a channel that comes last moves to the front."""
    if stored is not None and len(stored) == 2:
        return (1, *stored)
    if stored is not None and len(stored) == 3 and stored[2] in (1, 3) and stored[0] not in (1, 3):
        return (stored[2], *stored[:2])
    return stored


def open_train(kind: str, path: Path, *, key: str | None = None, shape: tuple[int, ...] | None = None) -> SampleSet:
    """The training set at `path`; `key` names a column of a CSV file, `shape` that of an image folder's samples."""
    if kind == "digits":
        return open_npz(_DIGITS, ("",), levels=_DIGITS_LEVELS)
    if kind == "image-folder":
        return ImageSet(image_folders(path)[0], shape)
    if kind == "csv":
        return csv(path, key=key)
    if kind in ("idx", "fashion-mnist"):
        return _idx(kind, path, "train")
    if kind in ("cifar10", "cifar100"):
        images = open_cifar(kind, path, test=False)
        assert images is not None
        return images
    return _npz(kind, path, ("_train", ""))


def open_test(
    kind: str, path: Path, *, inside: bool, key: str | None = None, shape: tuple[int, ...] | None = None
) -> SampleSet | None:
    """The test set at `path`; with `inside` the one that belongs to the training set there, None if there is none."""
    if kind in ("idx", "fashion-mnist"):
        has_test = not inside or (path.is_dir() and _idx_file(path, "t10k", "images") is not None)
        return _idx(kind, path, "t10k") if has_test else None
    if kind in ("cifar10", "cifar100"):
        images = open_cifar(kind, path, test=True)
        if images is None and not inside:
            raise InputError(f"{path}: expected the test set of {kind}, got none")
        return images
    if kind == "image-folder" and inside:
        test = image_folders(path)[1]
        return ImageSet(test, shape) if test is not None else None
    if kind in ("npz", "har"):
        return None if inside and not has_samples(path, "_test") else _npz(kind, path, ("_test", ""))
    return None if inside else open_train(kind, path, key=key, shape=shape)


def image_folders(path: Path) -> tuple[Path, Path | None]:
    """The folders of training and of test images: CLASS/FILE in `path` itself, or in its train/ and test/."""
    train = next((path / name for name in TRAIN_NAMES if _has_folders(path / name)), None)
    test = next((path / name for name in TEST_NAMES if _has_folders(path / name)), None)
    return (train, test) if train is not None else (path, None)


def _has_folders(path: Path) -> bool:
    """Whether there are folders in a folder: those of classes, where `train` itself is no class."""
    try:
        with os.scandir(path) as entries:
            return any(entry.is_dir() and not entry.name.startswith(".") for entry in entries)
    except OSError:
        return False


def _npz(kind: str, path: Path, endings: Sequence[str]) -> SampleSet:
    if kind == "npz":
        return open_npz(path, endings)
    samples = open_npz(path, endings, names=_HAR)
    if "s" in samples.keys:
        samples.keys = {**samples.keys, "person": samples.keys["s"]}
    return samples


def _idx(kind: str, path: Path, prefix: str) -> SampleSet:
    if path.is_dir():
        images, labels = _idx_file(path, prefix, "images"), _idx_file(path, prefix, "labels")
        for what, file in (("images-idx3", images), ("labels-idx1", labels)):
            if file is None:
                raise InputError(f"{path}: expected a file {prefix}-{what}-ubyte or {prefix}-{what}-ubyte.gz, got none")
        assert images is not None
        assert labels is not None
    else:
        images = path
        labels = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
        if labels == images:
            raise InputError(f"{path}: expected a folder, or a file whose name has 'images', got neither")
    pixels, numbers = idx_array(images, num_axes=3), idx_array(labels, num_axes=1)
    names = _FASHION if kind == "fashion-mnist" else None
    return ArraySet(pixels, labels_of(numbers, pixels.shape[0], names), where=numbers.where)


def _idx_file(folder: Path, prefix: str, kind: str) -> Path | None:
    axes = "idx3" if kind == "images" else "idx1"
    names = (f"{prefix}-{kind}{dot}{axes}-ubyte{gz}" for dot in "-." for gz in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)
