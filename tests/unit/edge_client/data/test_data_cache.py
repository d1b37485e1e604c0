"""Plain copies of data sets and kept partitions: what a simulation of many devices reads."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_client.config.device_file import DataSection
from edge_client.data import partitions
from edge_client.data.data_cache import cache_arrays, write_partition
from edge_client.data.npz_writer import NpzWriter
from edge_client.data.openers import describe_data, open_named
from edge_client.data.sources import all_samples, open_data
from edge_client.errors import InputError

DIGITS = tuple(str(digit) for digit in range(10))
RNG = np.random.default_rng(12)


def _parts(path: Path, partition: str, num_parts: int, shape: tuple[int, ...], classes: tuple[str, ...] = DIGITS):
    for part in range(num_parts):
        section = DataSection(source=f"npz:{path}", partition=partition, part=(part, num_parts))
        yield open_data(section, classes, shape)


def test_images_stay_bytes_and_are_read_in_place(tmp_path: Path) -> None:
    """The arrays are numpy's own to read, byte for byte those of CIFAR's files; a device holds numbers only."""
    images = RNG.integers(0, 256, (24, 3072), dtype=np.uint8)
    labels = np.arange(24, dtype=np.uint8) % 10
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        rows = slice(4 * number, 4 * number + 4)
        (tmp_path / f"{name}.bin").write_bytes(np.concatenate([labels[rows, None], images[rows]], axis=1).tobytes())
    text = f"cifar10:{tmp_path}"
    path = cache_arrays(text, tmp_path / "cache")
    with np.load(path) as arrays:
        assert np.array_equal(arrays["x_train"], images[:20].reshape(20, 3, 32, 32))
        assert np.array_equal(arrays["x_test"], images[20:].reshape(4, 3, 32, 32))
        assert np.array_equal(arrays["y_train"], labels[:20])
        assert (arrays["x_train"].dtype, arrays["y_train"].dtype) == (np.uint8, np.uint8)
    assert describe_data(f"npz:{path}") == describe_data(text)
    train, _ = next(_parts(path, "iid", 2, (3, 32, 32), describe_data(text).classes))
    assert train.held_bytes == 10 * 16


def test_the_digits_get_a_test_set_that_all_devices_share(tmp_path: Path) -> None:
    """20 % of 1,797 are 359; ten devices test each of them once, and train on each of the other 1,438 once."""
    path = cache_arrays("digits", tmp_path)
    assert describe_data(f"npz:{path}") == ((1, 8, 8), DIGITS, 1438, 359)
    whole = open_data(DataSection(source="digits", test_fraction=0.0), DIGITS, (1, 8, 8))[0]
    seen = list(_parts(path, "dirichlet:1", 10, (1, 8, 8)))
    rows = [x.numpy().tobytes() for pair in seen for samples in pair for x in samples.batch(range(len(samples)))[0]]
    assert sorted(rows) == sorted(x.numpy().tobytes() for x in whole.batch(range(1797))[0])
    assert sum(len(test) for _, test in seen) == 359
    shared = all_samples(open_named(f"npz:{path}", test=True), DIGITS, (1, 8, 8))
    counts = np.sum([test.class_counts(10) for _, test in seen], axis=0)
    assert counts.tolist() == list(shared.class_counts(10))


def test_without_a_fraction_devices_keep_test_samples_of_their_own(tmp_path: Path) -> None:
    """A fifth of each part, as without the copy: the same samples."""
    path = cache_arrays("digits", tmp_path, test_fraction=0.0)
    section = DataSection(source="digits", partition="dirichlet:0.5", part=(3, 5))
    expected = open_data(section, DIGITS, (64,))
    got = list(_parts(path, "dirichlet:0.5", 5, (64,)))[3]
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.batch(range(len(mine)))[0], theirs.batch(range(len(theirs)))[0])
        assert torch.equal(mine.labels, theirs.labels)


def test_a_copy_is_made_once_and_again_for_other_data(tmp_path: Path) -> None:
    """The same name while the file stays; another one if it changes, or if the seed does."""
    source = tmp_path / "d.npz"
    np.savez(source, x=RNG.standard_normal((20, 3)), y=np.arange(20) % 2)
    text = f"npz:{source}"
    path = cache_arrays(text, tmp_path / "cache")
    stamp = path.stat().st_mtime_ns, path.stat().st_ino
    assert cache_arrays(text, tmp_path / "cache") == path
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == stamp
    assert cache_arrays(text, tmp_path / "cache", seed=2) != path
    np.savez(source, x=RNG.standard_normal((20, 3)), y=np.arange(20) % 2)
    os.utime(source, ns=(10**18, 10**18))
    assert cache_arrays(text, tmp_path / "cache") != path


def test_a_table_is_copied_with_its_key_and_shape(tmp_path: Path) -> None:
    """Columns as the model's input, in the order of the run's classes; persons stay together."""
    names = ["ann", "bob", "cid", "dan"]
    lines = [f"{i},{i + 0.5},{names[i % 4]},{'dent' if i % 3 else 'ok'}" for i in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,who,label", *lines]))
    text = f"csv:{tmp_path / 't.csv'}"
    kwargs = {"partition": "key:who", "classes": ("ok", "dent"), "shape": (1, 1, 2), "test_fraction": 0.0}
    path = cache_arrays(text, tmp_path, **kwargs)  # type: ignore[arg-type]
    facts = write_partition(f"npz:{path}", "key:who", 4, 1, tmp_path / "p.npz")
    assert facts == ((3, 3, 3, 3), (), ((1, 2), (1, 2), (1, 2), (1, 2)))
    for part, (train, test) in enumerate(_parts(path, f"file:{tmp_path / 'p.npz'}", 4, (1, 1, 2), ("ok", "dent"))):
        rows = torch.cat([samples.batch(range(len(samples)))[0] for samples in (train, test)])
        assert sorted(rows[:, 0, 0, 0].tolist()) == [part, part + 4, part + 8]


def test_a_kept_partition_is_what_a_device_would_compute(tmp_path: Path) -> None:
    """Sizes and class counts are those of the partition; the devices' samples are the same with it and without."""
    path = cache_arrays("digits", tmp_path)
    facts = write_partition(f"npz:{path}", "dirichlet:0.5", 6, 3, tmp_path / "p.npz")
    labels = open_named(f"npz:{path}").labels.values
    parts = partitions.dirichlet(labels, 6, 0.5, 3)
    assert facts.sizes == tuple(len(part) for part in parts)
    assert facts.class_counts == tuple(tuple(np.bincount(labels[part], minlength=10).tolist()) for part in parts)
    assert facts.test_sizes == (60, 60, 60, 60, 60, 59)
    for number, (train, test) in enumerate(_parts(path, f"file:{tmp_path / 'p.npz'}", 6, (64,))):
        section = DataSection(source=f"npz:{path}", partition="dirichlet:0.5", part=(number, 6), seed=3)
        assert torch.equal(train.labels, open_data(section, DIGITS, (64,))[0].labels)
        assert torch.equal(test.labels, open_data(section, DIGITS, (64,))[1].labels)


def test_test_samples_can_follow_each_devices_own_classes(tmp_path: Path) -> None:
    """With one label per device, its test samples have that label; together they are all of them."""
    path = cache_arrays("digits", tmp_path)
    facts = write_partition(f"npz:{path}", "pathological:1", 10, 1, tmp_path / "p.npz", test="same")
    assert sum(facts.test_sizes) == 359
    for train, test in _parts(path, f"file:{tmp_path / 'p.npz'}", 10, (64,)):
        assert set(test.labels.tolist()) == set(train.labels.tolist())
        assert len(set(train.labels.tolist())) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.full((20, 3), np.nan)}, "sample 0 has values that are not finite"),
        ({"x": np.zeros((20, 3), np.int32)}, "expected samples of uint8 or float, got int32"),
        ({"y": np.arange(20) % 2 * 5}, r"labels from 0 to 1 \(the run's classes\), got 5 at sample 1"),
        ({"y": np.arange(19) % 2}, "one label for each of 20 samples"),
        ({"x": np.zeros((20, 4))}, r"the model's input is \[3\], the samples are \[4\]"),
    ],
)
def test_bad_data_is_found_before_anything_is_trained(
    tmp_path: Path, change: dict[str, np.ndarray], message: str
) -> None:
    """One line with file and array, and no copy is left."""
    np.savez(tmp_path / "d.npz", **{"x": np.zeros((20, 3)), "y": np.arange(20) % 2} | change)
    with pytest.raises(InputError, match=rf"d\.npz: .*{message}"):
        cache_arrays(f"npz:{tmp_path / 'd.npz'}", tmp_path / "cache", classes=("a", "b"), shape=(3,))
    assert list((tmp_path / "cache").glob("*")) == []


@pytest.mark.parametrize("packed", [np.savez, np.savez_compressed])
def test_a_file_that_was_cut_off_is_found(tmp_path: Path, packed) -> None:
    """At any place."""
    packed(tmp_path / "d.npz", x=RNG.integers(0, 256, (50, 10, 10), dtype=np.uint8), y=np.arange(50) % 5)
    whole = (tmp_path / "d.npz").read_bytes()
    for length in (0, 10, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "d.npz").write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"d\.npz"):
            cache_arrays(f"npz:{tmp_path / 'd.npz'}", tmp_path / "cache")


def test_an_image_folder_needs_a_size(tmp_path: Path) -> None:
    """Its images may be of any; with one they are kept as bytes."""
    image = pytest.importorskip("PIL.Image")
    for number in range(3):
        (tmp_path / "i" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.full((4, 5, 3), 60 * number, dtype=np.uint8)
        image.fromarray(pixels).save(tmp_path / "i" / "ab"[number % 2] / f"{number}.png")
    text = f"image-folder:{tmp_path / 'i'}"
    assert describe_data(text) == (None, ("a", "b"), 3, 0)
    with pytest.raises(InputError, match=r"how large is a sample\? give the model's input"):
        cache_arrays(text, tmp_path)
    with np.load(cache_arrays(text, tmp_path, shape=(3, 2, 2), test_fraction=0.0)) as arrays:
        assert arrays["x_train"][:, 0, 0, 0].tolist() == [0, 120, 60]
        assert (arrays["x_train"].shape, arrays["x_train"].dtype) == ((3, 2, 2, 3), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train": np.zeros(5, int)}, "array 'train': expected the part of each of 6 samples, got int64 .5."),
        ({"train": np.zeros(6)}, "expected the part of each of 6 samples, got float64"),
        ({"train": np.array([0, 1, 2, 3, 0, 1])}, "expected parts from 0 to 2, or -1 for nobody, got 3 at sample 3"),
        ({"train": np.array([0, 1, -2, 2, 0, 1])}, "expected parts from 0 to 2, or -1 for nobody, got -2 at sample 2"),
        ({"train": np.array([0, 1, 1, 1, 0, 1])}, "none of 6 samples belongs to part 2 of 3"),
        ({"tests": np.zeros(6, int)}, "expected an array 'train', got tests"),
    ],
)
def test_a_partition_file_of_other_data_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    """Somebody's own division is checked like everything else."""
    np.savez(tmp_path / "d.npz", x=np.zeros((6, 2)), y=np.zeros(6, int))
    np.savez(tmp_path / "p.npz", **arrays)
    section = DataSection(source=f"npz:{tmp_path / 'd.npz'}", partition=f"file:{tmp_path / 'p.npz'}", part=(0, 3))
    with pytest.raises(InputError, match=rf"p\.npz: .*{message}"):
        open_data(section, ["a"], (2,))


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Neither the file nor a piece of it."""

    def blocks():
        yield np.zeros((2, 3))
        raise InputError("the source has changed")

    with pytest.raises(InputError, match="has changed"), NpzWriter(tmp_path / "d.npz") as file:
        file.add_blocks("x", np.dtype(np.float64), (4, 3), blocks())
    with pytest.raises(ValueError, match="was to have 4 rows, got 2"), NpzWriter(tmp_path / "d.npz") as file:
        file.add_blocks("x", np.dtype(np.float64), (4, 3), [np.zeros((2, 3))])
    assert list(tmp_path.iterdir()) == []
