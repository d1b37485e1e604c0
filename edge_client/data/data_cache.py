"""A data set of any kind as one plain file, and its division among many devices, each made once for a simulation.

    arrays      one npz file, not compressed: workers read single samples of it in place, so a thousand devices on one
                machine cost one copy on disk. Images stay bytes, everything else is float32.
    partition   which part each sample belongs to (`division`), so that no device has to compute it again

Making them reads everything: a file that is cut off, has another shape, labels out of range or values that are not
finite is found before anything is trained. Needs numpy, not torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_client.data import openers, partitions, registry
from edge_client.data.array_set import ArraySet, reshapes
from edge_client.data.arrays import Indices
from edge_client.data.division import divide_test, divide_train, write_parts
from edge_client.data.labels import positions
from edge_client.data.npz_writer import NpzWriter
from edge_client.data.sample_set import SampleSet, find_key
from edge_client.errors import InputError

__all__ = ["PartitionFacts", "cache_arrays", "write_partition"]

_LAYOUT = 1  # of the cached file; its name depends on it
_BLOCK_BYTES = 8 << 20
_TEST_SPLIT = 0x5EED  # keeps the draw of the global test set apart from those of partitions


class PartitionFacts(NamedTuple):
    """How many samples each device has."""

    sizes: tuple[int, ...]  # training samples
    test_sizes: tuple[int, ...]  # (): there is no test set
    class_counts: tuple[tuple[int, ...], ...]  # [device][class] of the training samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The data that a cached file holds, and for whom."""

    text: str
    partition: str
    test_fraction: float
    seed: int
    classes: tuple[str, ...] | None
    shape: tuple[int, ...] | None


def cache_arrays(
    text: str,
    folder: Path,
    *,
    partition: str = "",
    test_fraction: float = 0.2,
    seed: int = 1,
    classes: Sequence[str] | None = None,
    shape: Sequence[int] | None = None,
) -> Path:
    """The data named `text` as an npz file in `folder`; made once, and again only if the data's own files change.

    Data without a test set gives `test_fraction` of its samples to one, drawn by `seed`; 0 leaves it without. Labels
    become positions in `classes`, or else in those of `describe_data`. `partition` may name a key, which is kept.
    `shape` is that of a sample as the model wants it: needed for image folders, checked for all.
    """
    request = _Request(
        text=text,
        partition=partition if registry.parse_partition(partition).kind == "key" else "",
        test_fraction=test_fraction,
        seed=seed,
        classes=tuple(classes) if classes is not None else None,
        shape=tuple(shape) if shape is not None else None,
    )
    facts = [dataclasses.asdict(request), _stamp(text), _LAYOUT]
    path = folder / f"data-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.npz"
    if not path.exists():
        _write(path, request)
    return path


def _stamp(text: str) -> list[object]:
    """Names, sizes and times of the files; with others it is other data."""
    kind, place = registry.split_source(text)
    if not place:
        return []
    facts: list[object] = []
    try:
        for file in [Path(place), *sorted(Path(place).glob("*/*" if kind == "image-folder" else "*"))]:
            status = file.stat()
            facts.append([str(file.absolute()), status.st_size, 0 if file.is_dir() else status.st_mtime_ns])
    except OSError as error:
        raise InputError(f"data {text!r}: cannot read {place}: {error.strerror}") from error
    return facts


def _write(path: Path, request: _Request) -> None:
    train, test = openers.open_both(request.text, request.partition, request.shape)
    shape = request.shape or openers.input_shape(train.shape)
    if shape is None:
        raise InputError(f"data {request.text!r}: how large is a sample? give the model's input, such as [3, 96, 96]")
    request = dataclasses.replace(
        request, shape=shape, classes=request.classes or openers.class_names(train.labels, train.where)
    )
    train_rows = np.arange(len(train.labels.values))
    test_rows = np.arange(len(test.labels.values)) if test is not None else None
    if test is None and request.test_fraction > 0:
        rng = np.random.Generator(np.random.PCG64([request.seed, _TEST_SPLIT]))
        num_test = int(len(train_rows) * request.test_fraction)
        test_rows, train_rows = (np.sort(part) for part in np.split(rng.permutation(train_rows), [num_test]))
    with NpzWriter(path) as file:
        file.add("classes", np.array(request.classes, dtype=np.str_))
        _add_set(file, "_train", train, train_rows, request)
        if test_rows is not None:
            _add_set(file, "_test", test if test is not None else train, test_rows, request)


def _add_set(file: NpzWriter, ending: str, data: SampleSet, chosen: Indices, request: _Request) -> None:
    assert request.classes is not None
    values = positions(data.labels, request.classes, {}, data.where)[chosen]
    file.add(f"y{ending}", values.astype(np.min_scalar_type(len(request.classes))))
    key = registry.parse_partition(request.partition)
    if key.kind == "key" and data.keys:
        name = find_key(data.keys, key.name, data.where)
        file.add(f"{key.name or 'key'}{ending}", data.keys[name]()[chosen])
    assert request.shape is not None
    blocks = _blocks(data, chosen, request.shape)
    first = next(blocks, np.zeros((0, *request.shape), dtype=np.float32))
    file.add_blocks(f"x{ending}", first.dtype, (len(chosen), *first.shape[1:]), chain([first], blocks))


def _blocks(data: SampleSet, chosen: Indices, shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
    """Samples as they are kept: bytes of 255 levels stay, all else becomes what the model gets."""
    rows, convert = data.rows(chosen, shape)
    in_bytes = not isinstance(data, ArraySet) or data.levels == 255.0
    start, step = 0, 1  # the first sample alone tells how large they are
    while start < len(chosen):
        raw = rows.take(np.arange(start, min(len(chosen), start + step)))
        block = raw if raw.dtype == np.uint8 and in_bytes else convert(raw)
        yield (
            block if reshapes(block.shape[1:], shape) or block.dtype == np.uint8 else block.reshape(len(block), *shape)
        )
        start, step = start + len(block), max(1, _BLOCK_BYTES // max(1, block[0].nbytes))


def write_partition(
    text: str,
    partition: str,
    num_parts: int,
    seed: int,
    path: Path,
    *,
    test: str = "iid",
    without: Indices | None = None,
) -> PartitionFacts:
    """Divide the data named `text` among `num_parts` devices and keep that in `path`: their partition is `file:PATH`.

    A test set is divided `iid` (by key, if the training set is), or as `same`: in each device's own proportions of
    classes. Training samples at the positions `without` belong to no device. Raises `InputError` for what cannot be
    divided so: more devices than samples, a device without any.
    """
    if test not in ("iid", "same"):
        raise ValueError(f"expected test 'iid' or 'same', got {test!r}")
    train, tests = openers.open_both(text, partition)
    classes = openers.class_names(train.labels, train.where)
    labels = positions(train.labels, classes, {}, train.where)
    parts = divide_train(train, labels, partition, num_parts, seed)
    shared: list[Indices] | None = None
    if tests is not None:
        test_labels = positions(tests.labels, classes, {}, tests.where)
        if test == "same":
            shared = partitions.alike(parts, labels, test_labels, seed)
        else:
            shared = divide_test(train, parts, tests, test_labels, partition, seed)
    if without is not None and len(without):
        parts = [np.setdiff1d(part, without, assume_unique=True) for part in parts]
        if not all(map(len, parts)):
            raise InputError(
                f"{text}: without {len(without)} shared samples, a device would have none; take fewer devices"
            )
    write_parts(path, parts, shared, num_nobodys=len(without) if without is not None else 0)
    counts = (np.bincount(labels[part], minlength=len(classes)) for part in parts)
    return PartitionFacts(
        tuple(map(len, parts)), tuple(map(len, shared or ())), tuple(tuple(row.tolist()) for row in counts)
    )
