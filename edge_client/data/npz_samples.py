"""The samples of an npz file, also where it keeps them in a form that packs well.

    x            [n, ...]                samples as they are
    r, r0, r1    [3, n, height, width]   colour images as residual planes: G, R - G and B - G, each as differences along
                                         the rows and columns, all modulo 256; r0, r1, ... one after another
    x_b          [4, c, n, t]            windows of t steps of c float32 channels: byte k of every little-endian value

An ending such as `_train` comes after the letter: `x_train`, `r_train0`, `x_train_b`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.data.arrays import ArrayFile, Stored
from edge_client.data.split_arrays import Joined, Planes
from edge_client.errors import InputError

__all__ = ["samples_in"]


def samples_in(arrays: Mapping[str, ArrayFile], ending: str) -> Stored | None:
    """The samples with that ending in whatever form they are, or None if there are none."""
    if f"x{ending}" in arrays:
        return arrays[f"x{ending}"]
    if f"x{ending}_b" in arrays:
        return _windows(arrays[f"x{ending}_b"])
    residuals = [name for name in arrays if name == f"r{ending}" or _is_numbered(name, f"r{ending}")]
    residuals.sort(key=lambda name: (len(name), name))  # r_train10 comes after r_train9
    return Joined([_image_planes(arrays[name]) for name in residuals]) if residuals else None


def _is_numbered(name: str, stem: str) -> bool:
    number = name.removeprefix(stem)
    return name.startswith(stem) and number.isascii() and number.isdecimal()


def _image_planes(file: ArrayFile) -> Planes:
    if len(file.shape) != 4 or file.shape[0] != 3 or file.dtype != np.uint8:
        raise InputError(f"{file.where}: expected uint8 [3, samples, height, width], got {file.dtype} {file.shape}")
    return Planes(file, 1, _colours, sample_shape=(3, *file.shape[2:]), dtype=file.dtype)


def _colours(residuals: NDArray[Any]) -> NDArray[Any]:
    """[3, b, h, w] of differences as [b, 3, h, w] of red, green, blue."""
    planes = np.cumsum(np.cumsum(residuals, axis=2, dtype=np.uint8), axis=3, dtype=np.uint8)
    green, red, blue = planes[0], planes[1] + planes[0], planes[2] + planes[0]
    return np.stack([red, green, blue], axis=1)


def _windows(file: ArrayFile) -> Planes:
    if len(file.shape) != 4 or file.shape[0] != 4 or file.dtype != np.uint8:
        raise InputError(f"{file.where}: expected uint8 [4, channels, samples, steps], got {file.dtype} {file.shape}")
    _, channels, _, steps = file.shape

    def values(planes: NDArray[Any]) -> NDArray[Any]:
        """[4 * c, b, t] of bytes as [b, t, c] of floats."""
        whole = planes.reshape(4, channels, planes.shape[1], steps).transpose(2, 3, 1, 0)
        return np.ascontiguousarray(whole).view("<f4")[..., 0]

    return Planes(file, 2, values, sample_shape=(steps, channels), dtype=np.dtype("<f4"))
