"""CIFAR in its three forms, and Python batches that are programs."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_client.config.device_file import DataSection
from edge_client.data.cifar_pickle import PickledArray, read_batch
from edge_client.data.openers import describe_data, open_named
from edge_client.data.sources import open_data
from edge_client.errors import InputError

RNG = np.random.default_rng(8)
IMAGES = RNG.integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
LABELS = RNG.permutation(np.arange(24) % 10)
FINE = LABELS * 11  # 0 to 99
TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _text(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


def python2_batch(images: np.ndarray, labels: list[int], key: str = "labels") -> bytes:
    """What cPickle of Python 2 wrote, protocol 2, step by step: batch_label, labels, data, filenames."""
    data = images.reshape(len(images), 3072)
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\t"
    array += b"(K\x01" + b"M" + struct.pack("<H", len(data)) + b"M\x00\x0c\x86"
    array += b"cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNN"
    array += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    array += b"T" + struct.pack("<i", data.size) + data.tobytes() + b"tb"
    numbers = b"]q\x05(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    names = b"]q\x0c(" + b"".join(_text(f"{i}.png") for i in range(len(labels))) + b"e"
    items = _text("batch_label") + b"q\x02" + _text("training batch 1 of 5") + b"q\x03"
    items += _text(key) + b"q\x04" + numbers
    return b"\x80\x02}q\x01(" + items + _text("data") + b"q\x06" + array + _text("filenames") + names + b"u."


def _write(folder: Path, form: str, kind: str = "cifar10") -> Path:
    """20 training images and 4 test images; CIFAR-10 has five training files."""
    train = [f"data_batch_{n}" for n in range(1, 6)] if kind == "cifar10" else ["train"]
    test = "test_batch" if kind == "cifar10" else "test"
    labels = LABELS if kind == "cifar10" else FINE
    pieces = np.split(np.arange(20), len(train))
    for name, chosen in zip([*train, test], [*pieces, np.arange(20, 24)], strict=True):
        if form == "binary":
            coarse = [] if kind == "cifar10" else [np.full((len(chosen), 1), 7)]
            pixels = IMAGES[chosen].reshape(len(chosen), -1)
            records = np.concatenate([*coarse, labels[chosen, None], pixels], axis=1).astype(np.uint8)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        elif form == "python2":
            key = "labels" if kind == "cifar10" else "fine_labels"
            (folder / name).write_bytes(python2_batch(IMAGES[chosen], labels[chosen].tolist(), key))
        else:
            keys = ("labels", "data") if kind == "cifar10" else ("fine_labels", "data")
            batch = {keys[0]: labels[chosen].tolist(), keys[1]: IMAGES[chosen].reshape(len(chosen), 3072)}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=int(form[-1])))
    return folder


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
@pytest.mark.parametrize("form", ["binary", "python2", "python3-3", "python3-4"])
def test_every_version_gives_the_same_images(tmp_path: Path, kind: str, form: str) -> None:
    """Pixels as float32 / 255 in the order red, green, blue; labels by name; nothing but numbers is held."""
    _write(tmp_path, form, kind)
    facts = describe_data(f"{kind}:{tmp_path}")
    assert (facts.shape, facts.num_train, facts.num_test) == ((3, 32, 32), 20, 4)
    assert facts.classes == TEN or (facts.classes[::99], len(facts.classes)) == (("apple", "worm"), 100)
    section = DataSection(source=f"{kind}:{tmp_path}")
    train, test = open_data(section, facts.classes, facts.shape or ())
    x, y = train.batch([19, 0, 7, 0])
    assert torch.equal(x, torch.from_numpy(IMAGES[[19, 0, 7, 0]].astype(np.float32) / np.float32(255)))
    assert y.tolist() == (LABELS if kind == "cifar10" else FINE)[[19, 0, 7, 0]].tolist()
    assert torch.equal(test.batch(range(4))[0], torch.from_numpy(IMAGES[20:].astype(np.float32) / np.float32(255)))
    assert train.held_bytes < 1000


@pytest.mark.parametrize("place", ["d.npz", "."])
def test_an_npz_file_is_cifar_too(tmp_path: Path, place: str) -> None:
    """Named itself, or alone in the folder; channels may come last."""
    pixels = IMAGES.transpose(0, 2, 3, 1)
    np.savez(tmp_path / "d.npz", x_train=pixels[:20], y_train=LABELS[:20], x_test=pixels[20:], y_test=LABELS[20:])
    facts = describe_data(f"cifar10:{tmp_path / place}")
    assert facts == ((3, 32, 32), TEN, 20, 4)


def test_images_as_residual_planes(tmp_path: Path) -> None:
    """Green, red - green, blue - green, each as differences along rows and columns modulo 256, in two arrays."""

    def planes(rgb: np.ndarray) -> np.ndarray:
        red, green, blue = rgb[:, 0], rgb[:, 1], rgb[:, 2]
        whole = np.stack([green, red - green, blue - green])
        return np.diff(np.diff(whole, axis=2, prepend=np.uint8(0)), axis=3, prepend=np.uint8(0))

    arrays = {"r_train0": planes(IMAGES[:12]), "r_train1": planes(IMAGES[12:20]), "r_test": planes(IMAGES[20:])}
    np.savez_compressed(tmp_path / "d.npz", y_train=LABELS[:20], y_test=LABELS[20:], **arrays)
    section = DataSection(source=f"cifar10:{tmp_path / 'd.npz'}", partition="iid", part=(1, 2))
    train, test = open_data(section, TEN, (3, 32, 32))
    assert (len(train), len(test)) == (10, 2)
    pixels = torch.from_numpy(IMAGES.astype(np.float32) / np.float32(255))
    for samples in (train, test):
        x, y = samples.batch(range(len(samples)))
        found = [int((pixels == row).flatten(1).all(1).nonzero()) for row in x]
        assert [int(LABELS[number]) for number in found] == y.tolist()
    assert train.held_bytes < 10 * 3072 + 1000  # this part only


def _edit(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("form", "file", "change", "message"),
    [
        ("binary", "data_batch_2.bin", lambda b: b[:-1], "records of 3073 bytes, got 12291 bytes in all"),
        ("binary", "data_batch_2.bin", lambda b: b"", "records of 3073 bytes, got 0"),
        ("binary", "data_batch_3.bin", lambda b: b"\x0a" + b[1:], "3.bin: .* labels from 0 to 9 .* got 10 at sample 0"),
        ("python2", "data_batch_4", lambda b: b[:-20], "data_batch_4: .* ends too early"),
        ("python2", "data_batch_4", lambda b: b"", "ends too early"),
        ("python2", "data_batch_4", lambda b: b.replace(b"U\x06labels", b"U\x06labelz"), "4 numbers in the list"),
        ("python2", "data_batch_4", lambda b: b.replace(b"M\x00\x0c", b"M\x01\x0c"), "4, 3073. in 12288 bytes"),
        ("python2", "data_batch_4", lambda b: b.replace(b"U\x02u1", b"U\x02i8"), "something else than numpy's array"),
        ("python2", "data_batch_1", lambda b: b.replace(b"numpy\nndarray", b"os\nsystem"), "'os.system'"),
        ("python2", "test_batch", lambda b: b"(lp0\n.", "step b'l' at byte 1"),
    ],
)
def test_a_broken_batch_is_named(tmp_path: Path, form: str, file: str, change, message: str) -> None:
    """One line with the file, before anything is trained."""
    _edit(_write(tmp_path, form) / file, change)
    with pytest.raises(InputError, match=message) as caught:
        describe_data(f"cifar10:{tmp_path}")
    assert str(caught.value).count("\n") == 0


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    """Four of five: an interrupted download; none: what was expected."""
    (_write(tmp_path, "binary") / "data_batch_5.bin").unlink()
    with pytest.raises(InputError, match=r"data_batch_5\.bin of cifar10 missing"):
        describe_data(f"cifar10:{tmp_path}")
    with pytest.raises(InputError, match=r"expected train\.bin .* of cifar100\).* got data_batch_1\.bin"):
        describe_data(f"cifar100:{tmp_path}")


def test_images_of_another_size_are_not_cifar(tmp_path: Path) -> None:
    """28x28 in grey."""
    np.savez(tmp_path / "d.npz", x=np.zeros((5, 28, 28), np.uint8), y=np.zeros(5, np.int64))
    with pytest.raises(InputError, match=r"expected images of \[3, 32, 32\] as cifar10 has, got \(28, 28\)"):
        open_named(f"cifar10:{tmp_path / 'd.npz'}")


class _Program:
    """Unpickling this makes a folder."""

    def __init__(self, place: Path) -> None:
        self._place = str(place)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self._place,)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_is_a_program_is_refused(tmp_path: Path, protocol: int) -> None:
    """Nothing of it is run, wherever it stands."""
    hostile = _Program(tmp_path / "ran")
    for value in (hostile, {"data": hostile}, {"labels": [hostile]}, {hostile: 1}):
        (tmp_path / "data_batch_1").write_bytes(pickle.dumps(value, protocol=protocol))
        with pytest.raises(InputError, match="expected a batch of CIFAR's Python version"):
            read_batch(tmp_path / "data_batch_1")
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(hostile))  # it would have
    assert (tmp_path / "ran").exists()


def test_a_batch_is_read_as_what_it_holds(tmp_path: Path) -> None:
    """Texts, lists of numbers and texts, and where the array's bytes are."""
    data = python2_batch(IMAGES[:3], [5, 0, 255])
    (tmp_path / "b").write_bytes(data)
    batch = read_batch(tmp_path / "b")
    assert (batch["batch_label"], batch["labels"]) == ("training batch 1 of 5", [5, 0, 255])
    assert batch["data"] == PickledArray(shape=(3, 3072), offset=data.index(IMAGES[:3].tobytes()))
    unpickled = pickle.loads(data, encoding="latin1")  # the file that this test made is a pickle
    assert np.array_equal(unpickled["data"], IMAGES[:3].reshape(3, 3072))
    assert unpickled["labels"] == [5, 0, 255]


def test_only_input_errors_come_from_a_damaged_batch(tmp_path: Path) -> None:
    """400 seeded mutations of a valid file, most of them outside of its pixels."""
    good = python2_batch(IMAGES[:1], [5])
    rng = random.Random(4)
    path = tmp_path / "b"
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            place = rng.choice([rng.randrange(300), -rng.randint(1, 40)])
            bad[place] = rng.choice([rng.randrange(256), *b"(teu.Rbc]}K"])
        path.write_bytes(bad[: rng.choice([len(bad), rng.randrange(len(bad))])])
        with contextlib.suppress(InputError):
            read_batch(path)
