"""What lies in a folder of data, and the device.toml that says so: for people who join with `--data DIR`.

Goes by names only (suffixes of image files, the file names of MNIST); nothing is decoded, nothing is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_client import durable
from edge_client.errors import InputError

__all__ = ["Found", "keep_device_file", "recognise"]

_IMAGES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
_TRAIN, _TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")
_LOOKED_AT = 10_000  # entries of a folder; one with more is no folder of classes
_EXPECTED = (
    "images as train/CLASS/FILE (and test/CLASS/FILE) or CLASS/FILE, train.npz or train.csv (and test), one .npz or "
    ".csv file, or the files of MNIST (train-images-idx3-ubyte, ...)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The `data` section of a device file."""

    source: str
    train: Path
    test: Path | None = None

    def to_toml(self) -> str:
        """As it stands in device.toml."""
        paths = {"train": self.train, **({"test": self.test} if self.test else {})}
        words = [f'source = "{self.source}"', *(f"{key} = {_text(path)}" for key, path in paths.items())]
        return f"data = {{ {', '.join(words)} }}"


def recognise(path: Path) -> Found:
    """What lies at `path`; raises `InputError` for what is not there or not known."""
    place = path.absolute()
    try:
        if place.is_file():
            found = [kind for kind in (_tabular(place),) if kind]
        elif place.is_dir():
            found = list(_in_folder(place))
        else:
            raise InputError(f"--data {path}: expected {_EXPECTED}; there is nothing of that name")
    except OSError as error:
        raise InputError(f"--data {path}: cannot look into it: {error.strerror}") from error
    if not found:
        raise InputError(f"--data {path}: expected {_EXPECTED}; got {_seen(place)}; or write device.toml by hand")
    if len({kind.source for kind in found}) > 1:
        kinds = " and ".join(kind.source for kind in found)
        raise InputError(f"--data {path}: expected one kind of data, got {kinds}; write device.toml by hand")
    return found[0]


def _in_folder(folder: Path) -> Iterator[Found]:
    """Each kind at most once."""
    train, test = _inside(folder, _TRAIN, ("",)), _inside(folder, _TEST, ("",))
    if train is not None and _has_classes(train):
        yield Found(source="image-folder", train=train, test=test if test and _has_classes(test) else None)
    elif _has_classes(folder):
        yield Found(source="image-folder", train=folder)
    if _inside(folder, ("train-images",), ("-idx3-ubyte", "-idx3-ubyte.gz", ".idx3-ubyte", ".idx3-ubyte.gz")):
        yield Found(source="idx", train=folder)
    for suffix in (".npz", ".csv"):
        train, test = _inside(folder, _TRAIN, (suffix,)), _inside(folder, _TEST, (suffix,))
        every = [entry for entry in _entries(folder) if entry.suffix.lower() == suffix and entry.is_file()]
        if train is not None:
            yield Found(source=suffix[1:], train=train, test=test)
        elif len(every) == 1:
            yield Found(source=suffix[1:], train=every[0])


def _tabular(file: Path) -> Found | None:
    kind = file.suffix.lower()[1:]
    return Found(source=kind, train=file) if kind in ("npz", "csv") else None


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
    found = (entry for _, entry in zip(range(_LOOKED_AT), folder.iterdir(), strict=False))
    return sorted(entry for entry in found if not entry.name.startswith("."))


def _seen(place: Path) -> str:
    if not place.is_dir():
        return f"a file {place.name!r}"
    names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in _entries(place)]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}" if names else "an empty folder"


def _text(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def keep_device_file(path: Path, found: Found, *, asked: Path) -> str:
    """Write a device file that has the data alone, unless one is there; says which."""
    if path.exists():
        return f"{path} is there already and stays as it is; for {asked} it would say: {found.to_toml()}"
    text = f"# made by: edge-client join --data {_text(asked)}\n# other keys: labels, limits, rename, share, tasks\n"
    with durable.disk_errors(f"cannot write {path}"):
        durable.write_bytes(path, f"{text}{found.to_toml()}\n".encode(), point="device-file", mode=0o644)
    return f"wrote {path}: {found.to_toml()}"
