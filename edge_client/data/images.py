"""One folder of image files per class as a sample set: decoded file by file, when a batch wants them.

Opening it lists the files and reads their headers. Files that are no images, or are larger than any camera's, are
skipped: always the same ones, so that a device has the same samples in every round. If pixels turn out to be broken
later, the next sample of the same class takes their place. Both are counted and named in the log; from 1 % of the files
on, the data set is refused: that is no accident of single files.
Kept are the names of the files; the largest image counts too, because decoding takes room for one. Needs Pillow.
"""

from __future__ import annotations

import array
import logging
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_client.data.arrays import Indices, Rows
from edge_client.data.labels import Labels
from edge_client.data.sample_set import Convert, Keys
from edge_client.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageSet", "read_images"]

_log = logging.getLogger(__name__)

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # no others: some start programs to read a file
_MAX_PIXELS = 2**26  # a decompression bomb has more; decoded these are 256 MB
_MAX_BAD = 0.01
_MAX_NAMED = 5
_LIBRARY_BYTES = 8 * 10**6  # Pillow itself: 7.2 MB measured, with its decoders
_BYTES_PER_PIXEL = 4  # of a decoded image in Pillow, grey ones excepted
# what Pillow's decoders raise on files that lie
_BROKEN = (
    OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, AttributeError, OverflowError,
    RuntimeError, struct.error, zlib.error, Warning,
)  # fmt: skip


class ImageSet:
    """Images below `folder`, as [channels, height, width] in [0, 1]."""

    def __init__(self, folder: Path, shape: tuple[int, ...] | None) -> None:
        self.where = str(folder)
        self.shape = shape
        self.keys: Keys = {}
        self._folder = folder
        self._pillow = _pillow()
        if shape is not None:
            self._check_shape(shape)
        self._blob = bytearray()  # names of all files, one after another: a Python string each would take four times it
        self._ends = array.array("q", [0])
        self._max_pixels = 0
        names, values = self._scan()
        self.labels = Labels(values=np.array(values, dtype=np.int64), names=tuple(names))
        index_bytes = len(self._blob) + 8 * 2 * len(self._ends)
        self.held_bytes = index_bytes + 2 * _BYTES_PER_PIXEL * self._max_pixels + _LIBRARY_BYTES

    def _scan(self) -> tuple[list[str], array.array[int]]:
        names = self._class_names()
        counts = {name: len(self._files_of(name)) for name in names}
        empty = [name for name, count in counts.items() if not count]
        if empty:
            listed = ", ".join(repr(name) for name in empty[:_MAX_NAMED])
            raise InputError(f"{self._folder}: no images in class folder {listed}; add some, or remove the folder")
        self._bad = _Bad(self._folder, sum(counts.values()))
        values: array.array[int] = array.array("q")
        for number, name in enumerate(names):
            for file in self._files_of(name):  # listed again: the names of one class at a time are enough
                pixels = self._probe(os.path.join(self._folder, name, file))
                if pixels:
                    self._max_pixels = max(self._max_pixels, pixels)
                    self._blob += os.fsencode(file)
                    self._ends.append(len(self._blob))
                    values.append(number)
        self._bad.check()
        if self._bad.paths:
            num_bad, num_files = len(self._bad.paths), sum(counts.values())
            _log.warning("%s: %d of %d images cannot be decoded and are skipped", self._folder, num_bad, num_files)
        return names, values

    def _class_names(self) -> list[str]:
        try:
            with os.scandir(self._folder) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        except OSError as error:
            raise InputError(f"cannot read {self._folder}: {error.strerror}") from error
        if not names:
            raise InputError(f"{self._folder}: expected one folder of images per class, got no folders")
        return names

    def _files_of(self, name: str) -> list[str]:
        try:
            with os.scandir(self._folder / name) as entries:
                return sorted(e.name for e in entries if e.name.lower().endswith(_SUFFIXES) and e.is_file())
        except OSError as error:
            raise InputError(f"cannot read {self._folder / name}: {error.strerror}") from error

    def _probe(self, path: str) -> int:
        """Pixels that decoding the file will make, or 0 if it cannot be used."""
        try:
            with _strict(self._pillow), self._pillow.open(path, formats=_FORMATS) as image:
                if image.width * image.height > _MAX_PIXELS:
                    raise ValueError(f"{image.width}x{image.height} pixels, at most {_MAX_PIXELS} are decoded")
                if self.shape is not None:  # a JPEG is decoded at a smaller scale, if that is enough
                    image.draft(None, (self.shape[2], self.shape[1]))
                return int(image.width * image.height)
        except (*_BROKEN, self._pillow.DecompressionBombError) as error:
            self._bad.add(path, error)
            return 0

    def rows(self, indices: Indices, shape: tuple[int, ...]) -> tuple[Rows, Convert]:
        """Images decoded when they are taken."""
        self._check_shape(shape)
        return _ImageRows(self, indices, shape), _to_float

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or shape[0] not in (1, 3) or min(shape) < 1:
            raise InputError(
                f"{self._folder}: images are [3, height, width], or [1, height, width] in grey; "
                f"the model's input is {list(shape)}"
            )

    def size(self, number: int) -> tuple[int, int]:
        """Width and height of a sample's file."""
        with self._pillow.open(self.path(number), formats=_FORMATS) as image:
            return int(image.width), int(image.height)

    def path(self, number: int) -> str:
        """The file of a sample."""
        name = os.fsdecode(bytes(self._blob[self._ends[number] : self._ends[number + 1]]))
        assert self.labels.names is not None
        return os.path.join(self._folder, self.labels.names[int(self.labels.values[number])], name)

    def read(self, number: int, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
        """The pixels [height, width, channels], or None if they are broken."""
        path = self.path(number)
        if path in self._bad.paths:
            return None
        try:
            with _strict(self._pillow), self._pillow.open(path, formats=_FORMATS) as image:
                if image.width * image.height > _MAX_PIXELS:
                    raise ValueError(f"{image.width}x{image.height} pixels")
                return _decoded(self._pillow, image, shape)
        except (*_BROKEN, self._pillow.DecompressionBombError) as error:
            self._bad.add(path, error)
        self._bad.check()
        return None


def read_images(paths: Sequence[Path], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Single images as a model with this input takes them; raises `InputError` that names the file."""
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise InputError(f"{paths[0]}: the model takes samples of {list(shape)}, which are no images")
    pillow = _pillow()
    pixels = []
    for path in paths:
        try:
            with _strict(pillow), pillow.open(path, formats=_FORMATS) as image:
                if image.width * image.height > _MAX_PIXELS:
                    raise ValueError(f"{image.width}x{image.height} pixels, at most {_MAX_PIXELS} are decoded")
                pixels.append(_decoded(pillow, image, shape))
        except FileNotFoundError:
            raise InputError(f"{path} does not exist") from None
        except (*_BROKEN, pillow.DecompressionBombError) as error:
            raise InputError(f"{path} is no image that can be decoded: {' '.join(str(error).split())[:120]}") from None
    return _to_float(np.stack(pixels))


def _decoded(pillow: Any, image: Image, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    channels, height, width = shape
    mode = "RGB" if channels == 3 else "L"
    image.draft(None, (width, height))
    if image.mode.startswith("I"):  # 16 bits of grey, as industrial cameras make them: Pillow would cut them off
        deep = np.asarray(image, dtype=np.float32)
        image = pillow.fromarray((np.clip(deep, 0, 65_535) / 257).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no scale")
    small = image.convert(mode).resize((width, height), pillow.Resampling.BILINEAR)
    return np.asarray(small, dtype=np.uint8).reshape(height, width, channels)


def _to_float(raw: NDArray[Any]) -> NDArray[np.float32]:
    """[b, height, width, channels] of bytes as [b, channels, height, width] in [0, 1]."""
    return raw.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)


class _ImageRows:
    def __init__(self, images: ImageSet, chosen: Indices, shape: tuple[int, ...]) -> None:
        self._images = images
        self._chosen = chosen
        self._shape = shape
        self.held_bytes = chosen.nbytes

    def take(self, indices: Indices) -> NDArray[Any]:
        channels, height, width = self._shape
        out = np.empty((len(indices), height, width, channels), dtype=np.uint8)
        for place, position in enumerate(indices):
            out[place] = self._read(int(position))
        return out

    def _read(self, position: int) -> NDArray[np.uint8]:
        for candidate in self._same_class(position):
            pixels = self._images.read(int(self._chosen[candidate]), self._shape)
            if pixels is not None:
                return pixels
        path = self._images.path(int(self._chosen[position]))
        raise InputError(f"{path} cannot be decoded, and no other image of its class can")

    def _same_class(self, position: int) -> Iterator[int]:
        """The sample itself, then those of its class after it, from the end on those before it."""
        yield position
        values = self._images.labels.values[self._chosen]
        (mates,) = np.nonzero(values == values[position])
        after = np.concatenate([mates[mates > position], mates[mates < position]])
        yield from (int(mate) for mate in after)


class _Bad:
    """The files of a set that cannot be decoded."""

    def __init__(self, folder: Path, num_files: int) -> None:
        self.paths: dict[str, str] = {}
        self._folder = folder
        self._num_files = num_files

    def add(self, path: str, error: BaseException) -> None:
        """Note one; the first are named in the log."""
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        self.paths[path] = reason
        if len(self.paths) <= _MAX_NAMED:
            _log.warning("%s cannot be decoded and is skipped (%s)", path, reason)

    def check(self) -> None:
        """Raise `InputError` if there are too many."""
        if self.paths and len(self.paths) >= _MAX_BAD * self._num_files:
            listed = "; ".join(f"{path} ({why})" for path, why in list(self.paths.items())[:_MAX_NAMED])
            raise InputError(
                f"{self._folder}: {len(self.paths)} of {self._num_files} images cannot be decoded, below "
                f"{_MAX_BAD:.0%} would be skipped: {listed}"
            )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("image folders need Pillow; install it with: pip install 'fedfit[images]'") from error
    return Image


@contextmanager
def _strict(pillow: Any) -> Iterator[None]:
    """Pillow's warning of a decompression bomb as an error; its other warnings help nobody here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        yield
