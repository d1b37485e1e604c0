"""Recognises what kind of data a folder holds, and writes the device.toml for it (`edge-client join --data DIR`).

Only names decide (suffixes of image files, the file names of MNIST); no file is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_client import durable
from edge_client.errors import InputError

__all__ = ["DataLayout", "recognise", "write_device_file"]

_IMAGES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
_TRAIN, _TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")
_MOST_ENTRIES = 10_000  # entries of a folder; one with more is no folder of classes
_EXPECTED = (
    "images as train/CLASS/FILE (and test/CLASS/FILE) or CLASS/FILE, train.npz or train.csv (and test), one .npz or "
    ".csv file, or the files of MNIST (train-images-idx3-ubyte, ...)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLayout:
    """Where the data lies and which source reads it: the `data` section of a device file."""

    source: str
    train: Path
    test: Path | None = None

    def to_toml(self) -> str:
        """The section as text for device.toml."""
        paths = {"train": self.train, **({"test": self.test} if self.test else {})}
        words = [f'source = "{self.source}"', *(f"{key} = {_text(path)}" for key, path in paths.items())]
        return f"data = {{ {', '.join(words)} }}"


def recognise(path: Path) -> DataLayout:
    """Recognise the data at `path`; raises `InputError` if there is none."""
    place = path.absolute()
    try:
        if place.is_file():
            layouts = [layout for layout in (_tabular(place),) if layout]
        elif place.is_dir():
            layouts = list(_in_folder(place))
        else:
            raise InputError(f"--data {path}: expected {_EXPECTED}; there is nothing of that name")
    except OSError as error:
        raise InputError(f"--data {path}: cannot look into it: {error.strerror}") from error
    if not layouts:
        raise InputError(f"--data {path}: expected {_EXPECTED}; got {_contents(place)}; or write device.toml by hand")
    if len({layout.source for layout in layouts}) > 1:
        kinds = " and ".join(layout.source for layout in layouts)
        raise InputError(f"--data {path}: expected one kind of data, got {kinds}; write device.toml by hand")
    return layouts[0]


def _in_folder(folder: Path) -> Iterator[DataLayout]:
    """The layouts that the folder's entries suggest, each kind at most once."""
    train, test = _inside(folder, _TRAIN, ("",)), _inside(folder, _TEST, ("",))
    if train is not None and _has_classes(train):
        yield DataLayout(source="image-folder", train=train, test=test if test and _has_classes(test) else None)
    elif _has_classes(folder):
        yield DataLayout(source="image-folder", train=folder)
    if _inside(folder, ("train-images",), ("-idx3-ubyte", "-idx3-ubyte.gz", ".idx3-ubyte", ".idx3-ubyte.gz")):
        yield DataLayout(source="idx", train=folder)
    for suffix in (".npz", ".csv"):
        train, test = _inside(folder, _TRAIN, (suffix,)), _inside(folder, _TEST, (suffix,))
        every = [entry for entry in _entries(folder) if entry.suffix.lower() == suffix and entry.is_file()]
        if train is not None:
            yield DataLayout(source=suffix[1:], train=train, test=test)
        elif len(every) == 1:
            yield DataLayout(source=suffix[1:], train=every[0])


def _tabular(file: Path) -> DataLayout | None:
    kind = file.suffix.lower()[1:]
    return DataLayout(source=kind, train=file) if kind in ("npz", "csv") else None


def _inside(folder: Path, names: tuple[str, ...], suffixes: tuple[str, ...]) -> Path | None:
    """The first of `names` that is there; without a suffix, as a folder."""
    places = (folder / f"{name}{suffix}" for name in names for suffix in suffixes)
    return next((place for place in places if (place.is_file() if place.suffix else place.is_dir())), None)


def _has_classes(folder: Path) -> bool:
    """Whether a folder in it has an image."""
    return any(_has_image(entry) for entry in _entries(folder) if entry.is_dir())


def _has_image(folder: Path) -> bool:
    return any(entry.suffix.lower() in _IMAGES for entry in _entries(folder))


def _entries(folder: Path) -> list[Path]:
    """The first entries, hidden ones left out, sorted."""
    entries = (entry for _, entry in zip(range(_MOST_ENTRIES), folder.iterdir(), strict=False))
    return sorted(entry for entry in entries if not entry.name.startswith("."))


def _contents(place: Path) -> str:
    if not place.is_dir():
        return f"a file {place.name!r}"
    names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in _entries(place)]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}" if names else "an empty folder"


def _text(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def write_device_file(path: Path, layout: DataLayout, *, asked: Path) -> str:
    """Write a device file that names the data, unless there is one; returns a message about what was done."""
    if path.exists():
        return f"{path} is there already and stays as it is; for {asked} it would say: {layout.to_toml()}"
    text = f"# made by: edge-client join --data {_text(asked)}\n# other keys: labels, limits, rename, share, tasks\n"
    with durable.disk_errors(f"cannot write {path}"):
        durable.write_bytes(path, f"{text}{layout.to_toml()}\n".encode(), point="device-file", mode=0o644)
    return f"wrote {path}: {layout.to_toml()}"
