"""CIFAR-10 and CIFAR-100 as their authors publish them: the binary version, the Python version, or an npz file.

    binary   data_batch_1.bin ... test_batch.bin, or train.bin and test.bin: 1 (or 2) bytes of labels, 3,072 of pixels
    Python   data_batch_1 ... test_batch, or train and test: pickles, of which `cifar_pickle` reads what is needed
    npz      as the source `npz`

The names in the folder tell which of them it is. Images are [3, 32, 32] bytes and stay in the files.
(A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge_client.data.array_set import ArraySet, has_samples, open_npz
from edge_client.data.arrays import ArrayFile, Indices
from edge_client.data.cifar_pickle import PickledArray, read_batch
from edge_client.data.labels import from_array
from edge_client.data.sample_set import SampleSet
from edge_client.data.split_arrays import Joined
from edge_client.errors import InputError

__all__ = ["open_cifar"]

_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train "
    "trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
_CLASSES = {"cifar10": tuple(_CIFAR10.split()), "cifar100": tuple(_CIFAR100.split())}
_TRAIN = {"cifar10": tuple(f"data_batch_{number}" for number in range(1, 6)), "cifar100": ("train",)}
_TEST = {"cifar10": ("test_batch",), "cifar100": ("test",)}
_LABELS = {"cifar10": "labels", "cifar100": "fine_labels"}
_LABEL_BYTES = {"cifar10": 1, "cifar100": 2}  # of a record; the last one counts: CIFAR-100 has the coarse label first
_IMAGE = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32


def open_cifar(kind: str, path: Path, *, test: bool) -> SampleSet | None:
    """The training or test set of `cifar10` or `cifar100`; None if there is no test set."""
    if path.is_file():
        return _from_npz(kind, path, test=test)
    names = (_TEST if test else _TRAIN)[kind]
    for ending, read in ((".bin", _binary), ("", _python)):
        there = [name for name in names if (path / f"{name}{ending}").is_file()]
        if there and len(there) < len(names):
            missing = ", ".join(f"{name}{ending}" for name in names if name not in there)
            raise InputError(f"{path}: {missing} of {kind} missing; fetch the whole set again")
        if there:
            return _join(kind, [read(kind, path / f"{name}{ending}") for name in names])
    files = sorted(path.glob("*.npz"))
    if len(files) == 1:
        return _from_npz(kind, files[0], test=test)
    if test:
        return None
    raise InputError(
        f"{path}: expected {names[0]}.bin (the binary version of {kind}), {names[0]} (the Python version) or one .npz "
        f"file, got {_listed(path)}"
    )


def _join(kind: str, batches: Sequence[tuple[ArrayFile, Indices]]) -> SampleSet:
    pieces = [images for images, _ in batches]
    for images, values in batches:
        from_array(values, str(images.path), _CLASSES[kind])  # so that a label out of range is named with its file
    labels = from_array(np.concatenate([values for _, values in batches]), str(pieces[0].path), _CLASSES[kind])
    return ArraySet(Joined(pieces), labels, where=str(pieces[0].path))


def _listed(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "no files"


def _from_npz(kind: str, path: Path, *, test: bool) -> SampleSet | None:
    if test and not has_samples(path, "_test"):
        return None
    images = open_npz(path, ("_test",) if test else ("_train", ""), names=_CLASSES[kind])
    if images.shape not in (_IMAGE, (32, 32, 3)):
        raise InputError(f"{images.where}: expected images of {list(_IMAGE)} as {kind} has, got {images.shape}")
    return images


def _binary(kind: str, path: Path) -> tuple[ArrayFile, Indices]:
    """Records of labels and pixels, one after another."""
    skipped = _LABEL_BYTES[kind]
    record = skipped + _IMAGE_BYTES
    size = path.stat().st_size
    if size == 0 or size % record:
        raise InputError(
            f"{path}: expected records of {record} bytes, got {size} bytes in all; fetch the binary version again"
        )
    bytes_of = np.dtype(np.uint8)
    count = size // record
    images = ArrayFile(
        path=path, what="images", dtype=bytes_of, shape=(count, *_IMAGE), offset=skipped, open=None, stride=record
    )
    labels = ArrayFile(
        path=path, what="labels", dtype=bytes_of, shape=(count,), offset=skipped - 1, open=None, stride=record
    )
    return images, labels.read_all().astype(np.int64)


def _python(kind: str, path: Path) -> tuple[ArrayFile, Indices]:
    """A pickled dict of pixels and labels."""
    batch = read_batch(path)
    data, labels = batch.get("data"), batch.get(_LABELS[kind])
    if not isinstance(data, PickledArray) or len(data.shape) != 2 or data.shape[1] != _IMAGE_BYTES:
        came = list(data.shape) if isinstance(data, PickledArray) else "none"
        raise InputError(f"{path}: expected an array 'data' of [images, {_IMAGE_BYTES}] bytes, got {came}")
    if not isinstance(labels, list) or len(labels) != data.shape[0] or any(type(n) is not int for n in labels):
        raise InputError(f"{path}: expected {data.shape[0]} numbers in the list {_LABELS[kind]!r}")
    images = ArrayFile(
        path=path,
        what="images",
        dtype=np.dtype(np.uint8),
        shape=(data.shape[0], *_IMAGE),
        offset=data.offset,
        open=None,
    )
    return images, np.array(labels, dtype=np.int64)
