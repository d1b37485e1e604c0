"""The data of `benchmarks.science`: the first samples of a data set, as one npz file."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.science_groups import Setting
from edge_client.data.data_cache import cache_arrays

__all__ = ["fashion_mnist", "public_file", "subset"]

_Bytes = NDArray[np.uint8]


def subset(setting: Setting, folder: Path, out: Path) -> Path:
    """The first samples of the training and of the test set, bytes; made once in `out`."""
    path = out / f"{setting.data}-{setting.samples}-{setting.tests}.npz"
    if not path.exists():
        x_train, y_train, x_test, y_test = _SOURCES[setting.data](folder)
        np.savez(
            path,
            x_train=x_train[: setting.samples],
            y_train=y_train[: setting.samples].astype(np.int64),
            x_test=x_test[: setting.tests],
            y_test=y_test[: setting.tests].astype(np.int64),
        )
        if setting.public:
            np.savez(public_file(setting, out), x=x_train[-setting.public :], y=np.zeros(setting.public, np.int64))
    return path


def public_file(setting: Setting, out: Path) -> Path:
    """The last samples of the training set, which no device has; their labels are not in it."""
    return out / f"{setting.data}-public-{setting.public}.npz"


def fashion_mnist(folder: Path) -> tuple[_Bytes, _Bytes, _Bytes, _Bytes]:
    """Four idx files."""
    train, train_labels = (_idx(folder / f"train-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    test, test_labels = (_idx(folder / f"t10k-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    return train[:, None], train_labels, test[:, None], test_labels


def _idx(path: Path) -> _Bytes:
    with gzip.open(path) as file:
        data = file.read()
    shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def _cifar10(folder: Path) -> tuple[_Bytes, _Bytes, _Bytes, _Bytes]:
    """As its authors give it; or `cifar10.npz` with planes G, R - G, B - G, as differences along both axes."""
    path = folder / "cifar10.npz"
    if not path.exists():
        with tempfile.TemporaryDirectory() as space, np.load(cache_arrays(f"cifar10:{folder}", Path(space))) as file:
            return file["x_train"], file["y_train"], file["x_test"], file["y_test"]
    with np.load(path) as file:
        parts = [file[name] for name in sorted(file.files) if name.startswith("r_train")]
        train, test = np.concatenate([_planes(part) for part in parts]), _planes(file["r_test"])
        return train, file["y_train"], test, file["y_test"]


def _planes(differences: _Bytes) -> _Bytes:
    """[3, n, h, w] differences -> [n, 3, h, w] red, green, blue."""
    green, red, blue = np.cumsum(np.cumsum(differences, axis=2, dtype=np.uint8), axis=3, dtype=np.uint8)
    return np.stack([red + green, green, blue + green], axis=1)


_SOURCES = {"fashion-mnist": fashion_mnist, "cifar10": _cifar10}
