"""What lies in a folder, by the names of its files, and the device file that is written for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client.config.device_file import load_device_file
from edge_client.errors import InputError
from edge_client.operate.data_folder import DataLayout, recognise, write_device_file


def _make(root: Path, *names: str) -> Path:
    """Empty files; what ends with a slash is a folder."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    return root


@pytest.mark.parametrize(
    ("names", "source", "train", "test"),
    [
        (["train/ok/1.jpg", "train/dent/2.PNG", "test/ok/3.jpeg"], "image-folder", "train", "test"),
        (["train/ok/1.jpg", "val/ok/3.jpg", "notes.txt"], "image-folder", "train", "val"),
        (["train/ok/1.jpg", "test/empty/"], "image-folder", "train", None),
        (["ok/1.bmp", "dent/2.webp", ".cache/"], "image-folder", "", None),
        (["train.npz", "test.npz"], "npz", "train.npz", "test.npz"),
        (["measured.npz"], "npz", "measured.npz", None),
        (["train.csv", "other.csv"], "csv", "train.csv", None),
        (["Rows.CSV"], "csv", "Rows.CSV", None),
        (["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"], "idx", "", None),
        (["train-images.idx3-ubyte", "t10k-images.idx3-ubyte"], "idx", "", None),
    ],
)
def test_a_known_layout_is_recognised(
    tmp_path: Path, names: list[str], source: str, train: str, test: str | None
) -> None:
    """Paths are absolute."""
    root = _make(tmp_path / "data", *names)
    expected = DataLayout(source=source, train=root / train if train else root, test=root / test if test else None)
    assert recognise(root) == expected


def test_a_single_file_is_recognised(tmp_path: Path) -> None:
    """By its suffix."""
    _make(tmp_path, "a.npz", "b.csv", "c.txt")
    assert recognise(tmp_path / "a.npz") == DataLayout(source="npz", train=tmp_path / "a.npz")
    assert recognise(tmp_path / "b.csv") == DataLayout(source="csv", train=tmp_path / "b.csv")
    with pytest.raises(InputError, match=r"'c\.txt'"):
        recognise(tmp_path / "c.txt")


@pytest.mark.parametrize(
    ("names", "part"),
    [
        ([], "an empty folder"),
        (["readme.txt", "a/b/c.jpg"], "got a/, readme.txt"),
        (["one.csv", "two.csv"], "got one.csv, two.csv"),
        (["train.npz", "ok/1.jpg"], "image-folder and npz"),
        ([f"{i}.bin" for i in range(8)], "and 3 more"),
    ],
)
def test_what_is_not_known_is_refused_with_what_was_expected(tmp_path: Path, names: list[str], part: str) -> None:
    """And what was seen."""
    (tmp_path / "data").mkdir()
    with pytest.raises(InputError, match=r"--data .*expected") as caught:
        recognise(_make(tmp_path / "data", *names))
    assert part in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Nothing of that name."""
    with pytest.raises(InputError, match="nothing of that name"):
        recognise(tmp_path / "missing")


def test_the_written_file_says_what_was_found_and_is_never_replaced(tmp_path: Path) -> None:
    """It is a device file; a path with quotes, line ends and letters of any kind survives."""
    path, odd = tmp_path / "device.toml", tmp_path / 'ä "q"\n\\'
    layout = DataLayout(source="npz", train=odd / "x.npz")
    assert str(path) in write_device_file(path, layout, asked=odd)
    section = load_device_file(path).data
    assert section is not None
    assert (section.source, section.train, section.test) == ("npz", str(odd / "x.npz"), "")
    before = path.read_bytes()
    assert "stays as it is" in write_device_file(path, DataLayout(source="csv", train=odd), asked=odd)
    assert path.read_bytes() == before
