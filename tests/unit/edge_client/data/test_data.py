"""Data sources: the digits, idx and npz files, parts of a shared data set, and files that lie."""

from __future__ import annotations

import contextlib
import gzip
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_client.config.device_file import DataSection
from edge_client.data.sources import open_data
from edge_client.errors import InputError, NoSuchNameError

CLASSES = [str(digit) for digit in range(10)]
RNG = np.random.default_rng(5)
IMAGES = RNG.integers(0, 256, (60, 4, 6), dtype=np.uint8)
LABELS = np.arange(60) % 10


def _idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def _write_idx(folder: Path, prefix: str, images: np.ndarray, labels: np.ndarray, *, packed: bool) -> None:
    for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
        data = _idx(array)
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)


def _open(path: Path, source: str = "npz", shape: tuple[int, ...] = (1, 4, 6), **keys: object):
    return open_data(DataSection(source=source, train=str(path), **keys), CLASSES, shape)


def test_the_digits_are_the_published_ones() -> None:
    """1,797 samples; class counts as published with the data set; grey levels 0 to 16 become 0 to 1."""
    train, test = open_data(DataSection(source="digits", test_fraction=0.0), CLASSES, (1, 8, 8))
    assert (len(train), len(test)) == (1797, 0)
    assert train.class_counts(10) == (178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
    x, y = train.batch(torch.arange(1797))
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert (x.min().item(), x.max().item()) == (0.0, 1.0)
    first_row = torch.tensor([0.0, 0.0, 5.0, 13.0, 9.0, 1.0, 0.0, 0.0]) / 16  # of the first digit, a zero
    assert torch.equal(x[0, 0, 0], first_row)


def test_parts_of_the_digits_are_disjoint_and_complete() -> None:
    """Training and test samples of four devices together are the 1,797, each once."""
    sums = torch.zeros(10, dtype=torch.int64)
    seen: list[bytes] = []
    for part in range(4):
        section = DataSection(source="digits", partition="dirichlet:0.5", part=(part, 4), seed=2)
        for samples in open_data(section, CLASSES, (64,)):
            sums += torch.tensor(samples.class_counts(10))
            seen += [row.numpy().tobytes() for row in samples.batch(torch.arange(len(samples)))[0]]
    assert sums.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    whole = open_data(DataSection(source="digits", test_fraction=0.0), CLASSES, (64,))[0]
    assert sorted(seen) == sorted(row.numpy().tobytes() for row in whole.batch(torch.arange(1797))[0])


def test_the_test_fraction_is_split_off_the_same_way_every_time() -> None:
    """Part 1 of 30 has 60 of the 1,797 samples; 20 % of 60 are 12, the same 12 twice."""
    section = DataSection(source="digits", test_fraction=0.2, partition="iid", part=(1, 30))
    (train, test), (_, again) = (open_data(section, CLASSES, (1, 8, 8)) for _ in range(2))
    assert (len(train), len(test)) == (48, 12)
    assert torch.equal(test.batch(range(len(test)))[0], again.batch(range(len(again)))[0])


@pytest.mark.parametrize("packed", [False, True])
def test_idx_gives_the_samples_of_the_file_and_its_own_test_set(tmp_path: Path, packed: bool) -> None:
    """Plain files stay on disk (only indices and labels are held), packed ones are unpacked for this part only."""
    _write_idx(tmp_path, "train", IMAGES, LABELS, packed=packed)
    _write_idx(tmp_path, "t10k", IMAGES[:20], LABELS[:20], packed=packed)
    train, test = _open(tmp_path, "idx", partition="iid", part=(0, 2))
    assert (len(train), len(test)) == (30, 10)
    x, y = train.batch([4, 0])
    matches = [(torch.from_numpy(IMAGES.astype(np.float32) / 255) == row).all(-1).all(-1).nonzero() for row in x]
    assert [int(LABELS[int(m)]) for m in matches] == y.tolist()
    assert train.held_bytes == 30 * 8 + (30 * 24 if packed else 30 * 8)


def test_an_idx_images_file_finds_its_labels(tmp_path: Path) -> None:
    """`train` may name the images; the labels lie beside them."""
    _write_idx(tmp_path, "train", IMAGES, LABELS, packed=True)
    train, test = _open(tmp_path / "train-images-idx3-ubyte.gz", "idx")
    assert (len(train), len(test)) == (48, 12)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_with_both_sets(tmp_path: Path, save) -> None:
    """Stored and compressed members read the same; the values are those that numpy wrote."""
    path = tmp_path / "d.npz"
    save(path, x_train=IMAGES, y_train=LABELS, x_test=IMAGES[:7], y_test=LABELS[:7])
    train, test = _open(path)
    assert (len(train), len(test)) == (60, 7)
    x, y = train.batch([59, 3, 3])
    assert torch.equal(x[:, 0], torch.from_numpy(IMAGES[[59, 3, 3]].astype(np.float32) / np.float32(255)))
    assert y.tolist() == [9, 3, 3]


def test_npz_of_floats_channels_last_and_class_names(tmp_path: Path) -> None:
    """Floats are taken as they are, channels move to the front, and names map by the run's order of classes."""
    x = RNG.standard_normal((12, 5, 6, 3))
    np.savez(tmp_path / "d.npz", x=x, y=np.array(["9", "0", "1"] * 4))
    train, _ = _open(tmp_path / "d.npz", shape=(3, 5, 6), test_fraction=0.0)
    got, y = train.batch([1, 0])
    torch.testing.assert_close(got, torch.from_numpy(x[[1, 0]]).permute(0, 3, 1, 2).float(), rtol=0, atol=0)
    assert y.tolist() == [0, 9]


def test_windows_of_sensors_may_have_their_channels_last(tmp_path: Path) -> None:
    """[length, channels] on disk, [channels, length] in the model; the other way round they are as they are."""
    x = RNG.standard_normal((12, 8, 3))
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(12) % 10)
    turned, _ = _open(tmp_path / "d.npz", shape=(3, 8), test_fraction=0.0)
    plain, _ = _open(tmp_path / "d.npz", shape=(8, 3), test_fraction=0.0)
    stored = torch.from_numpy(x[[1, 0]]).float()
    assert torch.equal(turned.batch([1, 0])[0], stored.transpose(1, 2))
    assert torch.equal(plain.batch([1, 0])[0], stored)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e300], ids=["nan", "inf", "beyond float32"])
def test_a_value_that_is_not_finite_is_named_with_its_sample(tmp_path: Path, value: float, save) -> None:
    """When it is read; others are fine. In a model it would become NaN everywhere."""
    x = RNG.standard_normal((12, 24))
    x[7, 3] = value
    save(tmp_path / "d.npz", x=x, y=np.arange(12) % 10)
    train, _ = _open(tmp_path / "d.npz", shape=(24,), test_fraction=0.0)
    assert len(train.batch([8, 6])[0]) == 2
    with pytest.raises(InputError, match=r"d\.npz: array 'x': sample 7 has values that are not finite"):
        train.batch([8, 7, 6])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": IMAGES}, "expected an array 'y'"),
        ({"x": IMAGES, "y": LABELS[:5]}, "one label for each of 60 samples"),
        ({"x": IMAGES, "y": LABELS + 1}, "labels from 0 to 9 .the run's classes., got 10 at sample 9"),
        ({"x": IMAGES, "y": LABELS - 1}, "got -1 at sample 0"),
        ({"x": IMAGES, "y": LABELS.astype(float)}, "integer labels or class names, got float64"),
        ({"x": IMAGES, "y": np.array(["cat"] * 60)}, "class 'cat' not in the run"),
        ({"x": IMAGES.astype(np.int32), "y": LABELS}, "uint8 or float, got int32"),
        ({"x": IMAGES[:, :3], "y": LABELS}, "model's input is .1, 4, 6., the samples are .3, 6."),
        ({"x": np.asfortranarray(IMAGES), "y": LABELS}, "C-ordered"),
        ({"x": np.array([object()]), "y": LABELS}, "Python objects"),
        ({"x": np.float32(3), "y": LABELS}, "does not fit"),
    ],
)
def test_unusable_npz_says_what_was_expected(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    """The message names the file and what came."""
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(InputError, match=rf"bad\.npz.*{message}"):
        _open(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (b"", "an empty file"),
        (b"\x00\x00\x0d\x03" + bytes(12), "expected idx images"),
        (_idx(IMAGES)[:-1], "expected 1456 bytes, got 1455"),
        (_idx(IMAGES) + b"x", "expected 1456 bytes, got 1457"),
        (struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "expected .* bytes, got 16"),
        (_idx(IMAGES[:50]), "one label for each of 50"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_that_lie_are_refused(tmp_path: Path, images: bytes, message: str, packed: bool) -> None:
    """Truncated, too long, of another type, with a header that claims 2^96 pixels."""
    _write_idx(tmp_path, "train", IMAGES, LABELS, packed=packed)
    name = "train-images-idx3-ubyte" + ".gz" * packed
    (tmp_path / name).write_bytes(gzip.compress(images) if packed else images)
    with pytest.raises(InputError, match=message if not packed else "train-"):
        _open(tmp_path, "idx")


def test_a_small_gzip_that_claims_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    """4,294,967,295 labels cannot come out of 30 bytes: refused before anything is allocated."""
    _write_idx(tmp_path, "train", IMAGES, LABELS, packed=True)
    claim = struct.pack(">BBBBI", 0, 0, 8, 1, 2**32 - 1)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(claim))
    claim = struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 4, 6)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(claim))
    with pytest.raises(InputError, match="expected at least"):
        _open(tmp_path, "idx")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_only_input_errors_come_from_a_damaged_npz(tmp_path: Path, save) -> None:
    """500 seeded mutations of a valid file: flipped bytes and cuts."""
    path = tmp_path / "d.npz"
    save(path, x=IMAGES, y=LABELS)
    good = path.read_bytes()
    rng = random.Random(4)
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            bad[rng.choice([rng.randrange(len(bad)), rng.randrange(200), -rng.randint(1, 200)])] = rng.randrange(256)
        path.write_bytes(bad[: rng.choice([len(bad), rng.randrange(len(bad))])])
        with contextlib.suppress(InputError):
            train, _ = _open(path)
            train.batch(range(len(train)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "npz"}, "needs a path"),
        ({"source": "digits", "train": "x"}, "remove train"),
        ({"source": "digits", "part": (4, 4), "partition": "iid"}, "0 <= i < n, got .4, 4."),
        ({"source": "digits", "part": (0, 4)}, "needs data.partition"),
        ({"source": "digits", "partition": "dirichlet:0"}, "ALPHA above 0"),
        ({"source": "digits", "partition": "pathological"}, "got 'pathological'"),
        ({"source": "digits", "partition": "dirichlet:nan"}, "ALPHA above 0"),
        ({"source": "npz", "train": "/nowhere.npz"}, "data.train: /nowhere.npz does not exist"),
        ({"source": "idx", "train": "/nowhere"}, "data.train: /nowhere does not exist"),
        ({"source": "csv", "train": f"/{'x' * 300}"}, "data.train: cannot look at /x+: File name too long"),
    ],
)
def test_unusable_sections_say_what_to_write(keys: dict[str, object], message: str) -> None:
    """The device's owner reads this."""
    with pytest.raises(InputError, match=message):
        open_data(DataSection(**keys), CLASSES, (1, 8, 8))


def test_an_unknown_source_lists_the_known_ones() -> None:
    """A typo is fixed in seconds."""
    with pytest.raises(NoSuchNameError, match=r"known: cifar10, cifar100, csv, digits, .*npz$"):
        open_data(DataSection(source="minst"), CLASSES, (1, 8, 8))
