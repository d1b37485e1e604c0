"""The inputs of a fold: the server's tensors and the frozen updates, read from disk one tensor at a time.

Covers: absolute values whether weights or deltas travelled, the place of a slice's tensors in the whole model, the
order by device; in the memory of two tensors, with one open file.
Does not cover: whether the updates are acceptable; they passed the intake and the aggregator's check before.

A delta is added to the base given here. For a fold that is the server's own float32 model, not the rounded copy that
was sent: a step smaller than the rounding of a lossy codec would otherwise vanish in every round, and the run would
stand still.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from edge_client import records
from edge_client.errors import PayloadError
from edge_client.methods import coverage
from edge_client.methods.base import Header, Place
from edge_client.models.slicing import take_tensor
from edge_client.params import IndexMap, settle_buffer
from edge_client.records import Report
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX, Entry, read_header
from edge_client.wire.tensors import ContainerReader, read_entry

__all__ = ["FrozenSet", "FrozenUpdate", "ModelState", "add_delta", "stored_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenUpdate:
    """An accepted update; `num_samples` is what the coordinator stored, and decides over what the file says."""

    device: str
    path: Path
    num_samples: int
    slice: str = "full"


# the server's tensor -> the update's tensors that belong into it, and where
_Layout = dict[str, list[tuple[Entry, IndexMap | None]]]


@dataclass(frozen=True, slots=True)
class _Source:
    """The file of one update and the layout of its tensors."""

    header: Header
    path: Path
    is_delta: bool
    data_offset: int
    layout: _Layout


def stored_name(name: str) -> str:
    """The name in a container of a tensor that methods call as the model does, or `extra/...` if it is their own."""
    return name if name.startswith(EXTRA_PREFIX) else MODEL_PREFIX + name


class ModelState:
    """The tensors of a server container, by their names in the model."""

    def __init__(self, reader: ContainerReader, prefix: str = "") -> None:
        """Of several models in one container, `prefix` selects the one whose tensor names begin with it."""
        self._reader = reader
        self._prefix = prefix

    def names(self) -> list[str]:
        """Names of all tensors, in the order of the file."""
        stored = [name for part in (MODEL_PREFIX, EXTRA_PREFIX) for name in self._reader.names(self._prefix + part)]
        return [name.removeprefix(self._prefix).removeprefix(MODEL_PREFIX) for name in stored]

    def tensor(self, name: str) -> Tensor:
        """One tensor, read anew at every call."""
        return self._reader.tensor(self._prefix + stored_name(name))

    @property
    def notes(self) -> Mapping[str, Any]:
        """What the method noted about the model when the run began."""
        return coverage.notes_of(self._reader.header.meta)


def _whole_model(slice_name: str, names: Sequence[str]) -> Mapping[str, Place]:
    """The places of the whole model, which every update then has."""
    return {name: Place(name) for name in names}


class FrozenSet:
    """The updates of a round that count, sorted by device."""

    def __init__(
        self,
        base: Path,
        updates: Sequence[FrozenUpdate],
        *,
        prefix: str = "",
        places: Callable[[str, Sequence[str]], Mapping[str, Place]] = _whole_model,
        num_devices: int = 0,
        momentum: float = 0.0,
    ) -> None:
        """`places` maps the tensors of a slice to the whole model; `num_devices`, of the run so far, and `momentum`
        are for methods that need them; `prefix` as for `ModelState`.
        """
        self._base = base
        self._prefix = prefix
        self.num_devices = max(num_devices, len(updates))
        self.momentum = momentum
        self._places = places
        names = (entry.name.removeprefix(prefix) for entry in read_header(base).entries)
        self._names = [name for name in names if name.startswith((MODEL_PREFIX, EXTRA_PREFIX))]
        self._layouts: dict[tuple[str, tuple[Entry, ...]], _Layout] = {}
        self._sources = [self._open(update) for update in sorted(updates, key=lambda update: update.device)]
        self.headers: Sequence[Header] = tuple(source.header for source in self._sources)
        if len({header.device for header in self.headers}) != len(self.headers):
            raise ValueError("expected one update per device, got a device twice")

    def column(self, name: str) -> Iterator[tuple[Header, Tensor, IndexMap | None]]:
        """The absolute values of a tensor from each update that has it; may be read several times."""
        base: Tensor | None = None
        stored = stored_name(name)
        entries = ((source, *entry) for source in self._sources for entry in source.layout.get(stored, ()))
        for source, entry, where in entries:
            value = _read(source, entry)
            if source.is_delta:
                if base is None:
                    base = self._base_tensor(name)
                value = add_delta(name, value, take_tensor(base, where), source.header.device)
            yield source.header, value, where

    def _base_tensor(self, name: str) -> Tensor:
        with ContainerReader(self._base) as reader:
            return reader.tensor(self._prefix + stored_name(name))

    def _open(self, update: FrozenUpdate) -> _Source:
        container = read_header(update.path)
        report = records.from_map(Report, container.meta, where=f"update from {update.device!r}")
        key = (update.slice, container.entries)
        if key not in self._layouts:  # a thousand equal tables are kept once
            self._layouts[key] = _layout(container.entries, self._places(update.slice, self._names))
        header = Header(
            device=update.device,
            num_samples=update.num_samples,
            slice=update.slice,
            steps=report.steps,
            scalars=dict(report.scalars),
        )
        is_delta = report.payload == "delta"
        return _Source(header, update.path, is_delta, container.data_offset, self._layouts[key])


def _layout(entries: Sequence[Entry], places: Mapping[str, Place]) -> _Layout:
    layout: _Layout = {}
    for entry in entries:
        if entry.name in places:
            place = places[entry.name]
            layout.setdefault(place.name, []).append((entry, place.where))
    return layout


def _read(source: _Source, entry: Entry) -> Tensor:
    # opened for one tensor: 10 us, and a cohort of any size needs one descriptor
    fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_entry(fd, source.data_offset, entry)
    finally:
        os.close(fd)


def add_delta(name: str, delta: Tensor, base: Tensor, device: str) -> Tensor:
    """Add the base to a delta in place and return it; raises `PayloadError` if the two do not fit."""
    if delta.shape != base.shape or delta.dtype != base.dtype:
        raise PayloadError(
            "shape",
            f"update from {device!r}: {name!r} is {delta.dtype} {tuple(delta.shape)}, "
            f"the model has {base.dtype} {tuple(base.shape)}",
        )
    return settle_buffer(name, delta.add_(base))
