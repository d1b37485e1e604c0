"""Image folders: classes by name, files decoded one by one, and files that lie."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from edge_client.config.device_file import DataSection
from edge_client.data.sets import image_folder
from edge_client.data.sources import Samples, open_data
from edge_client.errors import InputError

CLASSES = ("scratch", "ok")


def save(path: Path, pixels: Any, mode: str | None = None, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(pixels, dtype=np.uint8))
    (image.convert(mode) if mode else image).save(path, **options)


def plain(value: int, size: tuple[int, int] = (6, 4)) -> Any:
    """An image of one colour: any resizing keeps it."""
    return np.full((*size, 3), value, dtype=np.uint8)


def fill(folder: Path, num: int) -> Path:
    """`num` images of each class: 51 for ok, 102 for scratch."""
    for number in range(num):
        save(folder / "ok" / f"{number:03}.png", plain(51))
        save(folder / "scratch" / f"{number:03}.png", plain(102))
    return folder


def open_folder(folder: Path, shape: tuple[int, ...] = (3, 8, 8), **keys: Any) -> tuple[Samples, Samples]:
    section = DataSection(source="image-folder", train=str(folder), **{"test_fraction": 0.0} | keys)
    return open_data(section, CLASSES, shape)


def test_folders_are_classes_and_files_are_samples_in_their_order(tmp_path: Path) -> None:
    """Colours 51 and 102 are 0.2 and 0.4; `ok` sorts first on disk and is class 1 of the run. Other files stay out."""
    fill(tmp_path / "train", 2)
    (tmp_path / "train" / "ok" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "list.csv").write_text("")
    fill(tmp_path / "test", 1)
    train, test = open_folder(tmp_path / "train", test=str(tmp_path / "test"))
    assert (len(train), len(test)) == (4, 2)
    x, y = train.batch([3, 0])
    assert x.shape == (2, 3, 8, 8)
    assert y.tolist() == [0, 1]
    torch.testing.assert_close(x, torch.tensor([0.4, 0.2]).reshape(2, 1, 1, 1).expand(2, 3, 8, 8))


def test_every_usual_kind_of_image_is_read_as_colour_or_grey(tmp_path: Path) -> None:
    """Grey, palette, alpha, 16 bits, and the formats; value 51 is 0.2 everywhere (JPEG within one level of 255)."""
    folder = tmp_path / "ok"
    for mode, name in (("L", "grey.png"), ("P", "palette.gif"), ("RGBA", "alpha.png"), ("RGB", "b.bmp")):
        save(folder / name, plain(51), mode)
    save(folder / "photo.JPG", plain(51, (64, 48)), quality=95)
    save(folder / "t.tiff", plain(51))
    save(folder / "w.webp", plain(51), lossless=True)
    Image.fromarray(np.full((6, 4), 51 * 257, dtype=np.uint16)).save(folder / "deep.png")
    for shape in ((3, 8, 8), (1, 5, 7)):
        train, _ = open_folder(tmp_path, shape)
        x, _ = train.batch(range(len(train)))
        assert x.shape == (8, *shape)
        torch.testing.assert_close(x, torch.full_like(x, 0.2), rtol=0, atol=1.01 / 255)


def test_rows_and_columns_are_not_exchanged(tmp_path: Path) -> None:
    """Upper half black, lower half white: the mean over each row is 0 above and 1 below; left and right alike."""
    pixels = plain(0, (8, 8))
    pixels[4:] = 255
    save(tmp_path / "ok" / "a.png", pixels)
    x, _ = open_folder(tmp_path, (1, 8, 8))[0].batch([0])
    assert x[0, 0, :, 0].tolist() == [0.0] * 4 + [1.0] * 4
    assert x[0, 0, 0].tolist() == [0.0] * 8


def test_only_the_index_is_held(tmp_path: Path) -> None:
    """20 images of 10x12: names of 7 bytes and 16 of positions, 8 x 120 for decoding one, 8 MB for Pillow itself."""
    for number in range(20):
        save(tmp_path / "ok" / f"{number:03}.png", plain(9, (10, 12)))
    train, _ = open_folder(tmp_path)
    assert train.held_bytes == 20 * 7 + 16 * 21 + 8 * 120 + 8 * 10**6 + 20 * 16


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (lambda f: None, (3, 8, 8), "data.train: .* does not exist on this device"),
        (lambda f: f.mkdir(), (3, 8, 8), "expected one folder of images per class, got no folders"),
        (lambda f: f.write_text(""), (3, 8, 8), "cannot read .*: Not a directory"),
        (lambda f: (fill(f, 1) / "dent").mkdir(), (3, 8, 8), "no images in class folder 'dent'"),
        (lambda f: fill(f, 1), (2, 8, 8), r"\[3, height, width\], or \[1, height, width\] .* input is \[2, 8, 8\]"),
        (lambda f: fill(f, 1), (64,), r"input is \[64\]"),
        (lambda f: save(f / "kratzer" / "a.png", plain(1)), (3, 8, 8), 'rename = { kratzer = "scratch" }'),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_before_training(
    tmp_path: Path, make: Any, shape: tuple[int, ...], message: str
) -> None:
    """Each with its own reason."""
    make(tmp_path / "d")
    with pytest.raises(InputError, match=message):
        open_folder(tmp_path / "d", shape)


def _png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with hardly any data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "data",
    [b"", b"no image at all", _png(9000, 9000), _png(2**31 - 1, 2**31 - 1), b"%!PS-Adobe-3.0 EPSF-3.0\n"],
    ids=["empty", "text", "bomb", "huge bomb", "postscript"],
)
def test_one_bad_file_in_many_is_skipped_and_named(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """1 of 201 files is below 1 %: 200 samples are left, the same ones every time."""
    fill(tmp_path, 100)
    (tmp_path / "ok" / "bad.png").write_bytes(data)
    with caplog.at_level(logging.WARNING):
        train, _ = open_folder(tmp_path)
    assert len(train) == 200
    told = [record.getMessage().split(" cannot")[0] for record in caplog.records]
    assert told == [str(tmp_path / "ok" / "bad.png"), f"{tmp_path}: 1 of 201 images"]
    assert train.class_counts(2) == (100, 100)


def test_from_one_percent_on_the_folder_is_refused_with_the_first_files(tmp_path: Path) -> None:
    """2 of 200; both are named."""
    fill(tmp_path, 99)
    for number in range(2):
        (tmp_path / "ok" / f"bad{number}.png").write_bytes(b"x")
    with pytest.raises(InputError, match=r"2 of 200 images cannot be decoded, .*bad0\.png .*bad1\.png"):
        open_folder(tmp_path)


def test_pixels_that_turn_out_to_be_broken_are_replaced_by_the_next_of_the_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file cut in its middle has a good header. 0 and 10 are its class's next ones; from 1 % on reading ends."""
    for number in range(199):
        save(tmp_path / "ok" / f"{number:03}.png", plain(number))
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3))
    for number in (9, 198):
        path = tmp_path / "ok" / f"{number:03}.png"
        save(path, noise)
        path.write_bytes(path.read_bytes()[:2000])
    train, _ = open_folder(tmp_path)
    assert len(train) == 199
    with caplog.at_level(logging.WARNING):
        x, _ = train.batch([8, 9, 9])
    assert (x[:, 0, 0, 0] * 255).round().tolist() == [8.0, 10.0, 10.0]
    assert len(caplog.records) == 1
    with pytest.raises(InputError, match="2 of 199 images cannot be decoded"):
        train.batch([198])


def test_no_other_image_of_the_class_is_an_input_error(tmp_path: Path) -> None:
    """The only `scratch` is cut: 1 of 201 would be skipped, but there is nothing in its place."""
    fill(tmp_path, 100)
    for path in (tmp_path / "scratch").iterdir():
        path.rename(tmp_path / "ok" / f"more{path.name}")
    save(tmp_path / "scratch" / "a.png", np.random.default_rng(1).integers(0, 256, (64, 64, 3)))
    data = (tmp_path / "scratch" / "a.png").read_bytes()
    (tmp_path / "scratch" / "a.png").write_bytes(data[:2000])
    train, _ = open_folder(tmp_path)
    with pytest.raises(InputError, match=r"a\.png cannot be decoded, and no other image of its class"):
        train.batch([200])


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "bmp", "tiff", "webp"])
def test_only_input_errors_come_from_damaged_images(tmp_path: Path, suffix: str) -> None:
    """40 seeded mutations per format; whatever Pillow raises on them, a device says what is wrong."""
    good = tmp_path / f"good.{suffix}"
    save(good, np.random.default_rng(3).integers(0, 256, (20, 24, 3)))
    data = good.read_bytes()
    rng = random.Random(6)
    for number in range(40):
        bad = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            bad[rng.choice([rng.randrange(len(bad)), rng.randrange(min(60, len(bad)))])] = rng.randrange(256)
        path = tmp_path / str(number) / "ok" / f"a.{suffix}"
        path.parent.mkdir(parents=True)
        path.write_bytes(bad[: rng.choice([len(bad), rng.randrange(len(bad))])])
        with contextlib.suppress(InputError):
            x, _ = open_folder(tmp_path / str(number))[0].batch([0])
            assert x.shape == (1, 3, 8, 8)


def test_names_that_are_no_text_are_files_too(tmp_path: Path) -> None:
    """Linux allows any bytes; a class folder's name must be text, or no run could name it."""
    save(tmp_path / "ok" / "a.png", plain(51))
    os.rename(tmp_path / "ok" / "a.png", os.fsencode(tmp_path / "ok") + b"/\xff.png")
    assert open_folder(tmp_path)[0].batch([0])[0].max().item() == pytest.approx(0.2)


def test_the_public_function_takes_a_size(tmp_path: Path) -> None:
    """One number for a square, or height and width; grey with one channel."""
    fill(tmp_path, 1)
    assert image_folder(tmp_path).shape == (3, 96, 96)
    assert image_folder(tmp_path, size=(8, 12), channels=1).shape == (1, 8, 12)
    with pytest.raises(InputError, match=r"input is \[4, 96, 96\]"):
        image_folder(tmp_path, channels=4)


def test_without_pillow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra: most devices have other data."""
    fill(tmp_path, 1)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install 'fedfit\[images\]'"):
        image_folder(tmp_path)
