"""What a phase trains on: samples as they are, or what the frozen units before it make of them.

The frozen units run without gradient and in evaluation mode (the loop sets it), a few samples at a time: their
activations would otherwise be the largest thing in memory. With `buffered` they run once per phase, and their outputs
lie in a file that is read batch by batch with `pread`; the pages of a mapping would count as this process's memory.

A group of samples always has the same size (the last one is filled up), so that an output has the same bits whether it
was computed for a batch or for the file: kernels for one or two samples round differently. A BatchNorm without running
statistics mixes the samples of a group; it sees a whole microbatch, as in training, and in the file one of random ones.
Does not cover: which units are frozen (`methods`), whether a file is worth it (`planning`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from edge_client import durable, faults
from edge_client.errors import MachineError
from edge_client.models.contract import Model
from edge_client.models.layout import arranged, precision
from edge_client.training.contract import Data, Phase

__all__ = ["Data", "Take", "frozen_units", "in_layout", "inputs"]

_CHUNK = 16  # samples that go through the frozen units at a time

# positions of samples, size of a microbatch -> x of each model (the run's own is ""), y
Take = Callable[[Tensor, int], tuple[dict[str, Tensor], Tensor]]


def in_layout(data: Data, *, channels_last: bool) -> Data:
    """The same samples; images lie in this layout."""
    return _ChannelsLast(data) if channels_last else data


class _ChannelsLast:
    def __init__(self, data: Data) -> None:
        self._data = data
        self.labels = data.labels

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self._data.batch(indices)
        return arranged(x), y


def frozen_units(model: Model, phase: Phase) -> list[str]:
    """The units that run before the phase's own."""
    if not phase.after:
        return []
    return [name for name in model.order[: model.order.index(phase.after) + 1] if name not in phase.bypassed]


@contextmanager
def inputs(
    models: Mapping[str, Model],
    phase: Phase,
    data: Data,
    *,
    microbatch: int,
    folder: Path | None = None,
    order: torch.Generator | None = None,
    dtype: str = "fp32",
) -> Iterator[Take]:
    """How to take samples in this phase; `folder` is where outputs of the frozen units are kept, none: nowhere.

    `order` draws the random groups of samples that a BatchNorm without running statistics sees for the file; `dtype`
    is that of the activations of frozen units.
    """
    if not phase.after:
        yield lambda chosen, _: _plain(data, chosen)
        return
    frozen = _Frozen(models, phase, data, dtype)
    if folder is None or len(data) == 0:
        yield frozen.outputs
        return
    with ExitStack() as stack:
        files = {key: stack.enter_context(_File(folder)) for key in models}
        for chosen, filled in _groups(len(data), frozen.size(microbatch), order if frozen.mixes else None):
            outputs, _ = frozen.outputs(filled, len(filled))
            for key, rows in outputs.items():
                files[key].write(chosen, rows[: len(chosen)])
        yield lambda chosen, _: ({key: file.read(chosen) for key, file in files.items()}, data.labels[chosen])


def _plain(data: Data, chosen: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    x, y = data.batch(chosen)
    return {"": x}, y


def _groups(num_samples: int, size: int, order: torch.Generator | None) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples in groups, and each group filled up to `size` with the samples that came first."""
    size = min(size, num_samples)
    mixed = torch.arange(num_samples) if order is None else torch.randperm(num_samples, generator=order)
    for start in range(0, num_samples, size):
        yield mixed[start : start + size], mixed[torch.arange(start, start + size) % num_samples]


class _Frozen:
    """The frozen units of one or more models."""

    def __init__(self, models: Mapping[str, Model], phase: Phase, data: Data, dtype: str) -> None:
        self._units = {key: frozen_units(model, phase) for key, model in models.items()}
        self._models = models
        self._data = data
        self._dtype = dtype
        modules = [model.get_submodule(unit) for key, model in models.items() for unit in self._units[key]]
        self.mixes = any(_mixes_samples(part) for module in modules for part in module.modules())

    def size(self, microbatch: int) -> int:
        """Samples that go through at a time."""
        return microbatch if self.mixes else min(_CHUNK, microbatch)

    @torch.no_grad()
    def outputs(self, chosen: Tensor, microbatch: int) -> tuple[dict[str, Tensor], Tensor]:
        """What the frozen units of each model make of these samples, at most a microbatch of them."""
        size = self.size(microbatch)
        whole: dict[str, Tensor] = {}
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            filled = part if self.mixes else part[torch.arange(size) % len(part)]
            x, _ = self._data.batch(filled)
            for key, model in self._models.items():
                with precision(self._dtype):
                    rows = model.run_units(self._units[key], x)[: len(part)]
                if len(part) == len(chosen):
                    whole[key] = rows
                    continue
                if key not in whole:
                    whole[key] = _room_for(len(chosen), rows)
                whole[key][start : start + len(part)] = rows
        return whole, self._data.labels[chosen]


def _mixes_samples(part: nn.Module) -> bool:
    """Whether an output depends on the other samples of the batch, in evaluation mode as well."""
    return isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None


def _room_for(count: int, rows: Tensor) -> Tensor:
    """Memory for `count` outputs like these, in the same layout."""
    return torch.empty((count, *rows.shape[1:]), dtype=rows.dtype, memory_format=_layout(rows))


def _layout(rows: Tensor) -> torch.memory_format:
    last = rows.ndim == 4 and not rows.is_contiguous() and rows.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


class _File:
    """Rows of equal size by position, in a file without a name: nothing is left of it, however the process ends."""

    def __init__(self, folder: Path) -> None:
        self._what = f"keeping activations in {folder}"
        with durable.disk_errors(self._what):
            self._fd, path = tempfile.mkstemp(dir=folder)
            os.unlink(path)
        self._like = torch.empty(0)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, positions: Tensor, rows: Tensor) -> None:
        """Put one row at each position."""
        self._like = torch.empty_like(rows[:1], memory_format=torch.preserve_format)
        views, row_bytes = _bytes_of(rows.contiguous())
        with durable.disk_errors(self._what):
            faults.point("worker.train.buffer")
            for position, view in zip(positions.tolist(), views, strict=True):
                _write_all(self._fd, view, position * row_bytes)

    def read(self, positions: Tensor) -> Tensor:
        """The rows at these positions, in the layout in which they were computed."""
        rows = torch.empty((len(positions), *self._like.shape[1:]), dtype=self._like.dtype)
        views, row_bytes = _bytes_of(rows)
        with durable.disk_errors(self._what):
            for position, view in zip(positions.tolist(), views, strict=True):
                _read_all(self._fd, view, position * row_bytes)
        return rows.contiguous(memory_format=_layout(self._like))


def _bytes_of(rows: Tensor) -> tuple[list[memoryview], int]:
    """The memory of each row of a contiguous tensor, and their size."""
    flat = rows.reshape(len(rows), -1).view(torch.uint8)
    return [flat[index].numpy().data for index in range(len(flat))], flat.shape[1]


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(fd, data, offset)  # a signal or a nearly full disk may cut a write short
        data, offset = data[count:], offset + count


def _read_all(fd: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.preadv(fd, [data], offset)
        if count == 0:
            raise MachineError(f"the file of activations ended at {offset}, it was written further; check the disk")
        data, offset = data[count:], offset + count
