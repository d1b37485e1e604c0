"""Data by its name: what it is, before anything is trained on it."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from edge_client.config.device_file import DataSection
from edge_client.data.openers import DataFacts, describe_data, open_named
from edge_client.data.registry import located, split_source
from edge_client.data.sources import all_samples, open_data
from edge_client.errors import InputError, NoSuchNameError
from edge_client.task.task import data_table

RNG = np.random.default_rng(6)
IMAGES = RNG.integers(0, 256, (30, 5, 6), dtype=np.uint8)
LABELS = np.arange(30) % 10
DIGITS = tuple(str(digit) for digit in range(10))
TEN = tuple("jihgfedcba")
HAR = ("walking", "walking-upstairs", "walking-downstairs", "sitting", "standing", "laying")


def _write_idx(folder: Path) -> None:
    for prefix, count in (("train", 30), ("t10k", 7)):
        for name, array in (("images-idx3", IMAGES[:count]), ("labels-idx1", LABELS[:count])):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            data = header + array.astype(np.uint8).tobytes()
            (folder / f"{prefix}-{name}-ubyte.gz").write_bytes(gzip.compress(data))


def write_har(path: Path, *, packed: bool = True) -> np.ndarray:
    """Twelve training and six test windows of eight steps of three channels; persons 1 to 3, and 4 to 6 in the test."""
    x = RNG.standard_normal((18, 8, 3)).astype(np.float32)
    arrays = {"y_train": np.arange(12) % 6, "s_train": np.arange(12) % 3 + 1}
    arrays |= {"y_test": np.arange(6), "s_test": np.arange(6) % 3 + 4}
    for ending, part in (("_train", x[:12]), ("_test", x[12:])):
        if packed:
            arrays[f"x{ending}_b"] = part.view(np.uint8).reshape(len(part), 8, 3, 4).transpose(3, 2, 0, 1)
        else:
            arrays[f"x{ending}"] = part
    np.savez_compressed(path, **{name: np.ascontiguousarray(array) for name, array in arrays.items()})
    return x


def test_the_digits_describe_themselves() -> None:
    """1,797 grey images of 8x8 as small-cnn wants them; no test set of their own."""
    assert describe_data("digits") == DataFacts((1, 8, 8), DIGITS, 1797, 0)


def test_idx_and_fashion_mnist_differ_in_their_names(tmp_path: Path) -> None:
    """The same files: numbers, or the published names in the order of the numbers."""
    _write_idx(tmp_path)
    assert describe_data(f"idx:{tmp_path}") == ((1, 5, 6), DIGITS, 30, 7)
    facts = describe_data(f"fashion-mnist:{tmp_path}")
    assert (facts.classes[0], facts.classes[9]) == ("T-shirt/top", "Ankle boot")
    assert (facts.shape, len(facts.classes), facts.num_test) == ((1, 5, 6), 10, 7)


@pytest.mark.parametrize(
    ("arrays", "facts"),
    [
        ({"x": IMAGES, "y": LABELS % 3}, ((1, 5, 6), ("0", "1", "2"), 30, 0)),
        ({"x": IMAGES.reshape(30, 30), "y": LABELS}, ((30,), DIGITS, 30, 0)),
        ({"x": np.zeros((30, 5, 6, 3)), "y": np.array(["no", "ab"] * 15)}, ((3, 5, 6), ("ab", "no"), 30, 0)),
        ({"x": np.zeros((30, 3, 5, 6)), "y": LABELS, "classes": np.array(TEN)}, ((3, 5, 6), TEN, 30, 0)),
        ({"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES, "y_test": LABELS}, ((1, 5, 6), DIGITS, 30, 30)),
    ],
    ids=["grey", "flat", "channels last, texts", "channels first, names", "test set"],
)
def test_an_npz_file_describes_itself(tmp_path: Path, arrays: dict[str, np.ndarray], facts: tuple[object, ...]) -> None:
    """Names if there are any, else numbers up to the largest; shapes as models want them."""
    np.savez(tmp_path / "d.npz", **arrays)
    assert describe_data(f"npz:{tmp_path / 'd.npz'}") == facts


def test_a_table_describes_itself(tmp_path: Path) -> None:
    """Numbers in their order, not in that of texts; the key's column is no part of a sample."""
    rows = [(1.5, "ann", 10), (2.5, "bob", 9), (3.5, "ann", 0)]
    (tmp_path / "t.csv").write_text("\n".join(["a,person,label", *(",".join(map(str, row)) for row in rows)]))
    text = f"csv:{tmp_path / 't.csv'}"
    assert describe_data(text, partition="key") == ((1,), ("0", "9", "10"), 3, 0)
    found = open_named(text, partition="key:person")
    assert (found.labels.values.tolist(), found.keys["person"]().tolist()) == ([2, 1, 0], ["ann", "bob", "ann"])
    with pytest.raises(InputError, match=r"line 2: expected a finite number, got 'ann'"):
        describe_data(text)
    with pytest.raises(InputError, match=r"t\.csv, line 1: partition 'key:site' needs a key 'site'.* got a, person"):
        describe_data(text, partition="key:site")


@pytest.mark.parametrize("packed", [True, False])
def test_sensor_windows_with_their_persons(tmp_path: Path, packed: bool) -> None:
    """The floats are those that were written, by bytes or plainly; each training person is a device."""
    x = write_har(tmp_path / "h.npz", packed=packed)
    text = f"har:{tmp_path / 'h.npz'}"
    assert describe_data(text, partition="key") == ((1, 8, 3), HAR, 12, 6)
    for part in range(3):
        section = DataSection(source=text, partition="key:person", part=(part, 3))
        train, test = open_data(section, HAR, (1, 8, 3))
        expected = np.flatnonzero(np.arange(12) % 3 == part)
        got, y = train.batch(range(4))
        assert torch.equal(got[:, 0], torch.from_numpy(x[expected]))
        assert y.tolist() == (expected % 6).tolist()
        assert len(test) == 2  # others test than train: equal random parts
    with pytest.raises(InputError, match="12 samples of 3 different keys cannot be divided among 4 devices"):
        open_data(DataSection(source=text, partition="key", part=(0, 4)), HAR, (8, 3))


def test_a_person_tests_what_is_of_that_person(tmp_path: Path) -> None:
    """Where training and test set have the same people."""
    x = RNG.standard_normal((12, 4))
    person = np.array(["ann", "bob", "ann", "cid"] * 3)
    arrays = {"x_train": x, "y_train": np.zeros(12, int), "site_train": person}
    arrays |= {"x_test": x[:5], "y_test": np.zeros(5, int), "site_test": person[:5]}
    np.savez(tmp_path / "d.npz", **arrays)
    section = DataSection(source="npz", train=str(tmp_path / "d.npz"), partition="key:site", part=(0, 3))
    train, test = open_data(section, ["a"], (4,))
    assert torch.equal(train.batch(range(6))[0], torch.from_numpy(x[person == "ann"].astype(np.float32)))
    assert torch.equal(test.batch(range(3))[0], torch.from_numpy(x[[0, 2, 4]].astype(np.float32)))


def test_labels_are_positions_in_the_given_classes(tmp_path: Path) -> None:
    """By name, in any order; the test set is the file's own."""
    arrays = {"x_train": IMAGES[:3], "y_train": ["b", "a", "b"], "x_test": IMAGES[:2], "y_test": ["c", "a"]}
    np.savez(tmp_path / "d.npz", **arrays)
    text = f"npz:{tmp_path / 'd.npz'}"
    assert open_named(text, ["c", "b", "a"], test=True).labels.values.tolist() == [0, 2]
    assert open_named(text, ["c", "b", "a"]).labels.values.tolist() == [1, 2, 1]
    samples = all_samples(open_named(text, ["c", "b", "a"], test=True), ["c", "b", "a"], None)
    assert samples.labels.tolist() == [0, 2]
    with pytest.raises(InputError, match="array 'y_test': class 'c' not in the run"):
        describe_data(text)  # no training sample has it


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": IMAGES, "y": LABELS - 1}, "expected labels from 0 to 65535, got -1 to 8"),
        ({"x": IMAGES, "y": LABELS + 70_000}, "expected labels from 0 to 65535, got 0 to 70009"),
        ({"x": IMAGES, "y": LABELS, "x_test": IMAGES, "y_test": LABELS + 1}, "array 'y_test': .* got 10 at sample 9"),
        ({"x": IMAGES[:0], "y": LABELS[:0]}, "expected training samples, got none"),
        ({"x": IMAGES, "y": LABELS, "classes": np.array(["a"])}, "labels from 0 to 0 .its own classes., got 1"),
        ({"r_train": IMAGES, "y_train": LABELS}, r"expected uint8 \[3, samples, height, width\], got uint8 .30, 5, 6."),
        ({"x_train_b": IMAGES, "y_train": LABELS}, r"expected uint8 \[4, channels, samples, steps\]"),
    ],
)
def test_labels_and_arrays_that_cannot_be_are_named(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    """With the file and the array."""
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(InputError, match=rf"d\.npz: .*{message}"):
        describe_data(f"npz:{tmp_path / 'd.npz'}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("npz", "data source 'npz' needs a path, such as npz:/data/npz, got 'npz'"),
        ("npz:", "needs a path"),
        ("digits:/x", "is part of fedfit and has no path"),
        ("npz:/nowhere.npz", "data 'npz:/nowhere.npz': /nowhere.npz does not exist"),
        ("cifar10:/nowhere", "/nowhere does not exist"),
        (f"csv:/{'x' * 300}", "cannot look at /x+: File name too long"),
    ],
)
def test_names_without_data_say_what_to_write(text: str, message: str) -> None:
    """Nothing was opened."""
    with pytest.raises(InputError, match=message):
        describe_data(text)


def test_an_unknown_name_lists_the_known_ones() -> None:
    """A typo is fixed in seconds."""
    with pytest.raises(NoSuchNameError, match=r"unknown data source 'cifar'; .*cifar10, cifar100, csv"):
        split_source("cifar:/data")


def test_data_without_a_test_set_says_so() -> None:
    """The digits have none."""
    with pytest.raises(InputError, match="data 'digits' has no test set; name one, or keep a fraction"):
        open_named("digits", test=True)


def test_a_source_with_its_path_is_short_for_both(tmp_path: Path) -> None:
    """In device.toml; a task reads them apart; two paths are one too many."""
    np.savez(tmp_path / "d.npz", x=IMAGES, y=LABELS)
    short = DataSection(source=f"npz:{tmp_path / 'd.npz'}")
    long = DataSection(source="npz", train=str(tmp_path / "d.npz"))
    assert located(short) == located(long) == long
    assert data_table(short)["train"] == str(tmp_path / "d.npz")
    first, second = (open_data(section, DIGITS, (1, 5, 6))[0] for section in (short, long))
    assert torch.equal(first.batch(range(24))[0], second.batch(range(24))[0])
    with pytest.raises(InputError, match=r"data\.source = 'npz:/a' and data\.train = '/b': two paths; remove one"):
        open_data(DataSection(source="npz:/a", train="/b"), DIGITS, (1, 5, 6))


def test_a_folder_of_images_may_have_train_and_test(tmp_path: Path) -> None:
    """By its name alone, wherever an image folder is named: two classes, three images to train on, two to test."""
    for part, count in (("train", 2), ("test", 1)):
        for kind in ("cat", "plane"):
            (tmp_path / part / kind).mkdir(parents=True)
            for number in range(count if kind == "cat" or part == "test" else count - 1):
                Image.new("RGB", (4, 4)).save(tmp_path / part / kind / f"{number}.png")
    facts = describe_data(f"image-folder:{tmp_path}")
    assert facts == (None, ("cat", "plane"), 3, 2)
    plain = describe_data(f"image-folder:{tmp_path / 'train'}")
    assert plain == (None, ("cat", "plane"), 3, 0)
