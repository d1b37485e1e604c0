"""Arrays that lie on disk in pieces: in several files one after another, or plane by plane.

Both are read as whole arrays are: only the chosen samples, and nothing is copied together before a batch wants it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.data.arrays import ArrayFile, Indices, Rows, Stored
from edge_client.errors import InputError

__all__ = ["Joined", "Planes"]

Combine = Callable[[NDArray[Any]], NDArray[Any]]


class Joined:
    """Several arrays of one kind as one: their samples one after another."""

    def __init__(self, pieces: Sequence[Stored]) -> None:
        first = pieces[0]
        for piece in pieces[1:]:
            if (piece.dtype, piece.shape[1:]) != (first.dtype, first.shape[1:]):
                raise InputError(
                    f"{piece.where}: expected samples of {first.dtype} {list(first.shape[1:])} as in {first.where}, "
                    f"got {piece.dtype} {list(piece.shape[1:])}"
                )
        self._pieces = pieces
        self.where = first.where if len(pieces) == 1 else f"{first.where} and {len(pieces) - 1} more"
        self.dtype = first.dtype
        self.shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:])

    def select(self, chosen: Indices) -> Rows:
        """The samples at `chosen`, counted through all pieces."""
        starts = np.cumsum([0, *(piece.shape[0] for piece in self._pieces)])
        piece_of = np.searchsorted(starts, chosen, side="right") - 1
        local_rows = chosen - starts[piece_of]
        row_in_piece = np.empty(len(chosen), dtype=np.int64)
        rows = []
        for number, piece in enumerate(self._pieces):
            (selected,) = np.nonzero(piece_of == number)
            row_in_piece[selected] = np.arange(len(selected))
            rows.append(piece.select(local_rows[selected]))
        return _JoinedRows(self, rows, piece_of, row_in_piece)


class _JoinedRows:
    def __init__(self, whole: Joined, rows: Sequence[Rows], piece_of: Indices, place: Indices) -> None:
        self._whole = whole
        self._rows = rows
        self._piece_of = piece_of
        self._place = place
        self.held_bytes = sum(row.held_bytes for row in rows) + piece_of.nbytes + place.nbytes

    def take(self, indices: Indices) -> NDArray[Any]:
        out = np.empty((len(indices), *self._whole.shape[1:]), dtype=self._whole.dtype)
        piece_of, row_in_piece = self._piece_of[indices], self._place[indices]
        for number in np.unique(piece_of):
            (selected,) = np.nonzero(piece_of == number)
            out[selected] = self._rows[number].take(row_in_piece[selected])
        return out


class Planes:
    """Samples whose planes lie apart: an array [planes, ..., samples, ...] that `combine` makes whole, per batch.

    `file` has `num_axes` axes of planes before that of the samples; `combine` gets [planes, b, ...].
    """

    def __init__(
        self,
        file: ArrayFile,
        num_axes: int,
        combine: Combine,
        *,
        sample_shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self.where = file.where
        self.dtype = dtype
        self._num_planes = math.prod(file.shape[:num_axes])
        self._num_samples = file.shape[num_axes]
        self.shape = (self._num_samples, *sample_shape)
        self._rows = replace(file, shape=(self._num_planes * self._num_samples, *file.shape[num_axes + 1 :]))
        self._combine = combine

    def select(self, chosen: Indices) -> Rows:
        """The samples at `chosen`: kept in pieces, made whole when they are taken."""
        of_planes = np.arange(self._num_planes)[:, None] * self._num_samples + chosen
        return _PlaneRows(self._rows.select(of_planes.ravel()), self._num_planes, len(chosen), self._combine)


class _PlaneRows:
    def __init__(self, rows: Rows, num_planes: int, num_chosen: int, combine: Combine) -> None:
        self._rows = rows
        self._firsts = np.arange(num_planes)[:, None] * num_chosen
        self._combine = combine
        self.held_bytes = rows.held_bytes

    def take(self, indices: Indices) -> NDArray[Any]:
        raw = self._rows.take((self._firsts + indices).ravel())
        return self._combine(raw.reshape(len(self._firsts), len(indices), *raw.shape[1:]))
