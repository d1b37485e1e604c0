"""The data sources by name, and the check of a device's `data` section, without torch and numpy."""

from __future__ import annotations

import math

from edge_client.errors import InputError, NoSuchNameError
from edge_client.files import DataSection

__all__ = ["names", "parse_partition", "validate", "validate_part"]

_SOURCES = {
    "csv": "a header line, then numbers; the labels in the column `label`, or else in the last one",
    "digits": "1,797 handwritten digits of 8x8 pixels, part of fedfit",
    "idx": "the four files of MNIST and its relatives, plain or .gz, in one folder",
    "image-folder": "one folder of image files per class, named as the class; needs Pillow (fedfit[images])",
    "npz": "arrays x and y, or x_train, y_train, x_test and y_test, in one .npz file",
}


def names() -> list[str]:
    """All sources, sorted."""
    return sorted(_SOURCES)


def validate(section: DataSection) -> None:
    """Raise `NoSuchNameError` for an unknown source, `InputError` for a section that cannot be used."""
    if not section.source:
        raise InputError(f"data.source is missing; name one of {', '.join(names())}, or let a task find the data")
    if section.source not in _SOURCES:
        raise NoSuchNameError.of("data source", section.source, names())
    if section.source == "digits" and (section.train or section.test):
        raise InputError("data source 'digits' is part of fedfit; remove train and test, or name another source")
    if section.source != "digits" and not section.train:
        raise InputError(f"data source {section.source!r} needs a path in data.train")
    validate_part(section)


def validate_part(section: DataSection) -> None:
    """Raise `InputError` for a part that there is not; a task's data is divided, too."""
    part, num_parts = section.part
    if part >= num_parts:
        raise InputError(f"data.part: expected [i, n] with 0 <= i < n, got [{part}, {num_parts}]")
    if num_parts > 1 and not section.partition:
        raise InputError(f'data.part = [{part}, {num_parts}] needs data.partition, such as "iid" or "dirichlet:0.5"')
    parse_partition(section.partition)


def parse_partition(text: str) -> tuple[str, float]:
    """`iid` or `dirichlet:ALPHA` as (kind, alpha); the empty text is `iid`."""
    kind, _, rest = text.partition(":")
    if text in ("", "iid"):
        return "iid", 0.0
    try:
        alpha = float(rest)
    except ValueError:
        alpha = math.nan
    if kind != "dirichlet" or not 0 < alpha <= 1e6:
        raise InputError(f'data.partition: expected "iid" or "dirichlet:ALPHA" with ALPHA above 0, got {text!r}')
    return kind, alpha
