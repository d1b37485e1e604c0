"""What a user's function may return, and what is said about the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from edge_client.config.device_file import DataSection
from edge_client.data.sets import npz
from edge_client.data.sources import Samples, divide
from edge_client.data.user_dataset import as_set
from edge_client.errors import InputError

CLASSES = ("ok", "dent", "rust")
RNG = np.random.default_rng(2)
X = RNG.random((20, 1, 4, 4), dtype=np.float32)
Y = np.arange(20) % 3


def open_given(data: object, shape: tuple[int, ...] | None = None, **section: Any) -> tuple[Samples, Samples]:
    return divide(as_set(data, "t.py", "train_data()"), None, DataSection(**section), CLASSES, shape, {})


class Listed(Dataset[Any]):
    """Samples from a list; `targets` and `classes` if given."""

    def __init__(self, pairs: list[Any], **attributes: Any) -> None:
        self.pairs = pairs
        self.num_reads = 0
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        return self.pairs[index]


PAIRS = [(torch.from_numpy(x), int(y)) for x, y in zip(X, Y, strict=True)]


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (torch.from_numpy(X), torch.from_numpy(Y)),
        [X, np.array(CLASSES)[Y]],
        (X, np.array([CLASSES[y] for y in Y], dtype=object)),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        Listed(PAIRS),
        Listed([(x.numpy(), CLASSES[y]) for x, y in PAIRS]),
        Listed([(x, torch.tensor([y])) for x, y in PAIRS], targets=Y.tolist()),
        Listed([(x, 2 - y) for x, y in PAIRS], classes=["rust", "dent", "ok"]),
        Subset(Listed([*PAIRS, *PAIRS], targets=torch.from_numpy(np.tile(Y, 2)), classes=list(CLASSES)), range(20, 40)),
    ],
    ids=["numpy", "torch", "names", "objects", "tensors", "pairs", "texts", "targets", "classes", "subset"],
)
def test_all_forms_give_the_same_samples(data: object) -> None:
    """X and Y of this module, whatever carries them; a fifth is kept for tests, the same one for all."""
    train, test = open_given(data)
    assert (len(train), len(test), train.shape) == (16, 4, (1, 4, 4))
    whole, _ = open_given(data, test_fraction=0.0)
    x, y = whole.batch([7, 0, 7])
    assert x.dtype == torch.float32
    assert torch.equal(x, torch.from_numpy(X[[7, 0, 7]]))
    assert y.tolist() == [1, 0, 1]
    assert torch.equal(test.labels, open_given((X, Y))[1].labels)


def test_bytes_are_scaled_and_other_numbers_are_not() -> None:
    """uint8 51 is 0.2; int64 51 is 51; float64 becomes float32."""
    for dtype, expected in ((np.uint8, 0.2), (np.int64, 51.0), (np.float64, 51.0)):
        x, _ = open_given((np.full((4, 2), 51, dtype), Y[:4]))[0].batch([0])
        assert x.tolist()[0] == pytest.approx([expected] * 2)
        x, _ = open_given(Listed([(np.full(2, 51, dtype), 0)] * 4))[0].batch([0])
        assert x.tolist()[0] == pytest.approx([expected] * 2)


def test_targets_spare_reading_every_sample() -> None:
    """One read for the shape; without targets, all are read to learn their labels."""
    with_targets, without = Listed(PAIRS, targets=list(Y)), Listed(PAIRS)
    open_given(with_targets)
    open_given(without)
    assert (with_targets.num_reads, without.num_reads) == (1, 21)


def test_arrays_count_as_held_and_files_mapped_into_memory_do_not(tmp_path: Path) -> None:
    """20 x 16 floats are 1,280 bytes; both parts together also hold 20 positions and 20 labels, 8 bytes each."""
    train, test = open_given((X, Y))
    assert train.held_bytes + test.held_bytes == 1280 + 320
    np.save(tmp_path / "x.npy", X)
    train, test = open_given((np.load(tmp_path / "x.npy", mmap_mode="r"), Y))
    assert train.held_bytes + test.held_bytes == 320


def test_the_input_of_the_task_may_add_a_channel_or_flatten() -> None:
    """[4, 4] as [1, 4, 4] and as [16]; [2, 8] is another shape."""
    for shape in ((1, 4, 4), (16,)):
        assert open_given((X[:, 0], Y), shape)[0].batch([0, 1])[0].shape == (2, *shape)
    with pytest.raises(InputError, match=r"the model's input is \[2, 8\], the samples are \[4, 4\]"):
        open_given((X[:, 0], Y), (2, 8))


def test_a_set_of_ours_is_taken_as_it_is(tmp_path: Path) -> None:
    """`npz` with an array `classes`: numbers map by their names."""
    np.savez(tmp_path / "d.npz", x=X, y=Y, classes=np.array(["rust", "ok", "dent"]))
    whole, _ = open_given(npz(tmp_path / "d.npz"), test_fraction=0.0)
    assert whole.labels[:3].tolist() == [2, 0, 1]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield 1


class Fails(Listed):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("disk gone")
        return self.pairs[index]


def changed(index: int, pair: Any) -> list[Any]:
    pairs: list[Any] = list(PAIRS)
    pairs[index] = pair
    return pairs


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "expected image_folder.., csv.., npz.., a map-style Dataset, or arrays .X, y., got NoneType"),
        (Endless(), "got Endless, which has no length"),
        (DataLoader(Listed(PAIRS)), "got a DataLoader; return its dataset"),
        (X, "got ndarray"),
        ("/data", "got str"),
        ((X, Y[:5]), "expected a label for each of 20 samples"),
        ((X, Y.astype(float)), "y: expected integer labels or class names, got float64"),
        ((X[:, 0, 0, 0], Y), r"X: expected \[samples, ...\]"),
        ((np.array([["a"]]), Y[:1]), "X: expected numbers, got <U1"),
        ((X, Y + 1), "got 3 at sample 2"),
        (Listed(changed(3, (torch.zeros(1, 4, 5), 0))), r"sample 3 is \[1, 4, 5\], sample 0 is \[1, 4, 4\]"),
        (Listed(changed(3, (PAIRS[3][0], float("nan")))), "sample 3: expected a label .*, got nan"),
        (Listed(changed(3, (PAIRS[3][0], True))), "sample 3: expected a label .*, got True"),
        (Listed(changed(3, (PAIRS[3][0], "ok"))), "sample 3 has label 'ok', sample 0 has 0"),
        (Listed(changed(3, (PAIRS[3][0], 2**70))), "beyond 64 bits"),
        (Listed(changed(3, ("text", 0))), "sample 3: expected a tensor or an array of numbers, got str"),
        (Listed(changed(3, ([[1], [2, 3]], 0))), "sample 3: expected a tensor"),
        (Listed(changed(3, (PAIRS[3][0],))), r"sample 3: expected \(x, label\)"),
        (Fails(PAIRS), "t.py: train_data.*: sample 5: OSError: disk gone"),
    ],
)
def test_everything_else_is_an_input_error_that_names_the_sample(data: object, message: str) -> None:
    """And the file of the task."""
    with pytest.raises(InputError, match=message) as caught:
        open_given(data)
    assert str(caught.value).startswith("t.py")


def test_what_shows_only_when_a_sample_is_read_names_it_too() -> None:
    """A value that is not finite, targets that lie, and a sample that changes its shape."""
    bad = X.copy()
    bad[11, 0, 2, 2] = np.inf
    with pytest.raises(InputError, match="sample 11 has values that are not finite"):
        open_given((bad, Y), test_fraction=0.0)[0].batch([3, 11])
    with pytest.raises(InputError, match="sample 1 has values that are not finite"):
        open_given((np.array([[1.0], [1e39]]), Y[:2]), test_fraction=0.0)[0].batch([0, 1])
    lies = Listed(PAIRS, targets=[0] * 20)
    with pytest.raises(InputError, match="sample 1 has label 1, its targets say 0"):
        open_given(lies, test_fraction=0.0)[0].batch([0, 1])
    odd = Listed(changed(4, (torch.zeros(3), 1)), targets=list(Y))
    with pytest.raises(InputError, match=r"sample 4 is \[3\]"):
        open_given(odd, test_fraction=0.0)[0].batch([4])


def test_an_empty_dataset_is_no_error_here() -> None:
    """The worker says that there are no samples."""
    train, test = open_given(Listed([]), (1, 4, 4))
    assert (len(train), len(test)) == (0, 0)
