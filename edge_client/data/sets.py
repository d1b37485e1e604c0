"""The data sets that a task's own functions can return by a call: `npz`, `csv` and `image_folder`.

None is held in memory unless its file is compressed. `user_dataset` makes a set of anything else that they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_client.data.array_set import open_npz
from edge_client.data.images import ImageSet
from edge_client.data.sample_set import SampleSet
from edge_client.data.tables import CsvSet

__all__ = ["csv", "image_folder", "npz"]


def npz(path: str | Path, *, test: bool = False, shape: Sequence[int] | None = None) -> SampleSet:
    """Arrays `x` and `y` of an npz file, or `x_train` and `y_train`; with `test` those of the test set.

    Bytes are scaled to [0, 1]. Labels are class names, or numbers with the names in an array `classes`, or positions
    in the run's classes. Other arrays with one value per sample, such as `person_train`, can be keys of a partition.
    `shape` is that of a sample, if not the file's.
    """
    return open_npz(Path(path), ("_test", "") if test else ("_train", ""), shape=shape)


def csv(path: str | Path, *, shape: Sequence[int] | None = None, key: str | None = None) -> SampleSet:
    """A CSV file: a header line, then numbers; the labels are in the column `label`, or else in the last one.

    `key` names a column that tells whose a row is (a person, a site); it is no part of the sample.
    """
    return CsvSet(Path(path), tuple(shape) if shape is not None else None, key)


def image_folder(path: str | Path, size: int | tuple[int, int] | None = 96, *, channels: int = 3) -> SampleSet:
    """One folder of image files per class, named as the class; resized to `size` (or height, width), in [0, 1]."""
    if size is None:
        return ImageSet(Path(path), None)
    height, width = (size, size) if isinstance(size, int) else size
    return ImageSet(Path(path), (channels, height, width))
