"""What `coordinator new --data PATH` learns from a person's own data: the classes, the shape of a sample, how many.

Covers: image folders, npz and csv files and the files of MNIST, as `edge-client join --data` recognises them.
Does not cover: what is written then (`new`).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from edge_client.data import openers
from edge_client.data.images import ImageSet
from edge_client.errors import InputError
from edge_client.operate.data_folder import recognise

__all__ = ["DataSummary", "look_at"]

_LARGEST_SIDE = 96  # of what a small model is trained on; larger images are made smaller
_SMALLEST_SIDE = 16
_NUM_SIZED = 200  # images whose size is looked at
_MOST_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """The data in short."""

    classes: tuple[str, ...]
    input: tuple[int, ...]  # the shape that a model gets
    num_samples: int
    what: str  # such as `images of 96 x 96`

    def describe(self) -> str:
        """`found 3 classes (cat, plane, ship), 450 images of 96 x 96`."""
        named = ", ".join(self.classes[:_MOST_NAMED]) + (", ..." if len(self.classes) > _MOST_NAMED else "")
        return f"found {len(self.classes)} classes ({named}), {self.num_samples} {self.what}"


def look_at(path: Path) -> DataSummary:
    """Open the training data at `path` and describe it; raises `InputError`."""
    layout = recognise(path)
    samples = openers.open_train(layout.source, layout.train)
    classes = openers.class_names(samples.labels, samples.where)
    num_samples = len(samples.labels.values)
    if len(classes) < 2:
        raise InputError(f"--data {path}: expected two classes or more, got {', '.join(classes) or 'none'}")
    if isinstance(samples, ImageSet):
        width, height = _usual_size(samples)
        side = max(_SMALLEST_SIDE, min(_LARGEST_SIDE, width, height))
        what = f"images of {width} x {height}"
        what += f", which devices resize to {side} x {side}" if (width, height) != (side, side) else ""
        return DataSummary(classes=classes, input=(3, side, side), num_samples=num_samples, what=what)
    shape = openers.input_shape(samples.shape)
    if shape is None:
        raise InputError(f"--data {path}: its samples have no shape of their own; name it with --input")
    what = f"samples of {' x '.join(map(str, shape))}"
    return DataSummary(classes=classes, input=shape, num_samples=num_samples, what=what)


def _usual_size(images: ImageSet) -> tuple[int, int]:
    """The median width and height of some images, which are spread over all of them."""
    num = len(images.labels.values)
    chosen = range(0, num, max(1, num // _NUM_SIZED))
    sizes = [images.size(number) for number in chosen]
    return statistics.median_low(w for w, _ in sizes), statistics.median_low(h for _, h in sizes)
