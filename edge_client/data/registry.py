"""The names of data and partitions as people write them, and the check of a `data` section, without torch and numpy.

    data        NAME or NAME:PATH      digits   npz:/data/a.npz   cifar10:/data/cifar-10-batches-bin
    partition   NAME or NAME:VALUE     iid   dirichlet:0.5   pathological:2   key:person

The same texts stand in device.toml and in a simulation's settings.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from edge_client.config.device_file import DataSection
from edge_client.errors import InputError, NoSuchNameError

__all__ = ["Partition", "located", "names", "parse_partition", "split_source", "validate", "validate_part"]

_SOURCES = {
    "cifar10": "CIFAR-10: the folder of its binary or Python version, or an .npz file",
    "cifar100": "CIFAR-100 with its 100 fine labels: a folder or an .npz file as for cifar10",
    "csv": "a header line, then numbers; the labels in the column `label`, or else in the last one",
    "digits": "1,797 handwritten digits of 8x8 pixels, part of fedfit",
    "fashion-mnist": "the four files of Fashion-MNIST in one folder, as idx, with the names of its classes",
    "har": "UCI HAR as windows of sensor values in one .npz file, with the person of each (partition key)",
    "idx": "the four files of MNIST and its relatives, plain or .gz, in one folder",
    "image-folder": "one folder of image files per class, named as the class; needs Pillow (fedfit[images])",
    "npz": "arrays x and y, or x_train, y_train, x_test and y_test, in one .npz file",
}
_PARTITIONS = "iid, dirichlet:ALPHA, balanced-dirichlet:ALPHA, pathological:LABELS, key, key:NAME or file:PATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How a data set is divided."""

    kind: str  # iid | dirichlet | balanced-dirichlet | pathological | key | file
    value: float = 0.0  # alpha, or labels per part
    name: str = ""  # of the key, or the path of the file


def names() -> list[str]:
    """All sources, sorted."""
    return sorted(_SOURCES)


def split_source(text: str) -> tuple[str, str]:
    """`npz:/data/a.npz` as (name, path), `digits` as (name, ""); opens nothing."""
    kind, colon, path = text.partition(":")
    if kind not in _SOURCES:
        raise NoSuchNameError.of("data source", kind, names())
    if kind == "digits" and colon:
        raise InputError(f"data source 'digits' is part of fedfit and has no path, got {text!r}")
    if kind != "digits" and not path:
        raise InputError(f"data source {kind!r} needs a path, such as {kind}:/data/{kind}, got {text!r}")
    return kind, path


def located(section: DataSection) -> DataSection:
    """`source = "npz:/a"` is short for `source = "npz", train = "/a"`."""
    if ":" not in section.source:
        return section
    kind, path = split_source(section.source)
    if section.train:
        raise InputError(f"data.source = {section.source!r} and data.train = {section.train!r}: two paths; remove one")
    return dataclasses.replace(section, source=kind, train=path)


def validate(section: DataSection) -> None:
    """Raise `NoSuchNameError` for an unknown source, `InputError` for a section that cannot be used."""
    section = located(section)
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


def parse_partition(text: str) -> Partition:
    """A partition by its name; the empty text is `iid`."""
    kind, colon, rest = text.partition(":")
    if text in ("", "iid"):
        return Partition(kind="iid")
    if kind in ("dirichlet", "balanced-dirichlet"):
        alpha = _number(rest)
        if not 0 < alpha <= 1e6:
            raise InputError(f"partition: expected {kind}:ALPHA with ALPHA above 0 and at most 1e6, got {text!r}")
        return Partition(kind=kind, value=alpha)
    if kind == "pathological":
        if not rest.isascii() or not rest.isdecimal() or not 1 <= _number(rest) <= 65_536:
            raise InputError(f"partition: expected pathological:LABELS with 1 or more labels per device, got {text!r}")
        return Partition(kind=kind, value=float(rest))
    if (kind == "key" and bool(colon) == bool(rest)) or (kind == "file" and rest):
        return Partition(kind=kind, name=rest)
    raise InputError(f"partition: expected {_PARTITIONS}, got {text!r}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
