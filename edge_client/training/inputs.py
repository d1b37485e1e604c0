"""What a phase trains on: samples as they are, or what the frozen units before it make of them.

The frozen units run without gradient and in evaluation mode (the loop sets it), a few samples at a time: their
activations would otherwise be the largest thing in memory. With `buffered` each of them runs once: outputs lie in a
file, and the next phase goes on from there (`StoredOutputs`). It is read batch by batch with `pread`; the pages of a
mapping would count as this process's memory.

A group of samples always has the same size (the last one is filled up), so that an output has the same bits whether it
was computed for a batch or for the file: kernels for one or two samples round differently. A BatchNorm without running
statistics mixes the samples of a group; it sees a whole microbatch, as in training, and in the file one of random ones.
Does not cover: which units are frozen (`methods`), whether a file is worth it (`planning`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from edge_client.device.accelerator import CPU, Accelerator, device_of
from edge_client.models.contract import Model
from edge_client.models.layout import arranged
from edge_client.training.contract import Data, Phase
from edge_client.training.row_file import RowFile, layout_of

__all__ = ["Data", "StoredOutputs", "Take", "brought", "frozen_units", "inputs", "mixes_samples"]

_CHUNK = 16  # samples that go through the frozen units at a time

# positions of samples, size of a microbatch -> x of each model (the run's own is ""), y
Take = Callable[[Tensor, int], tuple[dict[str, Tensor], Tensor]]


def brought(data: Data, device: Accelerator, *, channels_last: bool) -> Data:
    """The same samples; a batch of them comes to the device, and its images lie in this layout."""
    return _Brought(data, device, channels_last=channels_last) if channels_last or device is not CPU else data


class _Brought:
    def __init__(self, data: Data, device: Accelerator, *, channels_last: bool) -> None:
        self._data = data
        self._device = device
        self._channels_last = channels_last
        self.labels = data.labels  # of all samples: they stay on the host

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self._data.batch(indices)
        return self._device.move(arranged(x) if self._channels_last else x), self._device.move(y)


def frozen_units(model: Model, phase: Phase) -> list[str]:
    """The units that run before the phase's own."""
    if not phase.after:
        return []
    return [name for name in model.order[: model.order.index(phase.after) + 1] if name not in phase.bypassed]


class StoredOutputs:
    """Outputs of the frozen units of the phase before, in files: those units have not changed since."""

    def __init__(self) -> None:
        self._after = ""
        self._bypassed: frozenset[str] = frozenset()
        self._files: dict[str, RowFile] = {}

    def __enter__(self) -> StoredOutputs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the disk back."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def begin(self, models: Mapping[str, Model], phase: Phase) -> tuple[str, dict[str, RowFile]]:
        """The unit whose outputs are stored, and their files by model; none if the phase cannot go on from there."""
        usable = self._after in frozen_units(models[""], phase) and self._bypassed == phase.bypassed
        if not usable or any(key not in self._files for key in models):
            self.close()
            return "", {}
        return self._after, self._files

    def keep(self, phase: Phase, files: dict[str, RowFile]) -> None:
        """Store these for the next phase, and close those before them."""
        if files is not self._files:
            self.close()
        self._after, self._bypassed, self._files = phase.after, phase.bypassed, files


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
    stored: StoredOutputs | None = None,
) -> Iterator[Take]:
    """A function that takes samples in this phase. Outputs of the frozen units are stored in `folder`, if it is given.

    `order` draws the random groups of samples that a BatchNorm without running statistics sees for the file: the same
    in all phases. `dtype` is that of the activations of frozen units.
    """
    with ExitStack() as stack:
        stored = stored or stack.enter_context(StoredOutputs())
        if not phase.after:
            stored.close()
            yield lambda chosen, _: _plain(data, chosen)
        elif folder is None or len(data) == 0:
            stored.close()
            yield _Frozen(models, phase, data, dtype).outputs
        else:
            start, files = stored.begin(models, phase)
            if start != phase.after:
                frozen = _Frozen(models, phase, data, dtype, start, files)
                files = frozen.write(folder, microbatch, order)
            stored.keep(phase, files)
            device = device_of(models[""])
            yield lambda chosen, _: (
                {key: device.move(file.read(chosen)) for key, file in files.items()},
                device.move(data.labels[chosen]),
            )


def _plain(data: Data, chosen: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    x, y = data.batch(chosen)
    return {"": x}, y


def _groups(num_samples: int, size: int, order: torch.Generator | None) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples in groups, and each group filled up to `size` with the samples that came first."""
    size = min(size, num_samples)
    positions = torch.arange(num_samples) if order is None else torch.randperm(num_samples, generator=order)
    for start in range(0, num_samples, size):
        yield positions[start : start + size], positions[torch.arange(start, start + size) % num_samples]


class _Frozen:
    """The frozen units of one or more models."""

    def __init__(
        self,
        models: Mapping[str, Model],
        phase: Phase,
        data: Data,
        dtype: str,
        start: str = "",
        files: Mapping[str, RowFile] | None = None,
    ) -> None:
        """`files` have the outputs of the units up to `start`, by model."""
        self._units = {key: _following(start, frozen_units(model, phase)) for key, model in models.items()}
        self._models = models
        self._data = data
        self._files = files or {}
        self._dtype = dtype
        modules = [model.unit(unit) for key, model in models.items() for unit in self._units[key]]
        self.mixes = any(mixes_samples(child) for module in modules for child in module.modules())

    def size(self, microbatch: int) -> int:
        """Samples that go through at a time."""
        return microbatch if self.mixes else min(_CHUNK, microbatch)

    @torch.no_grad()
    def outputs(self, chosen: Tensor, microbatch: int) -> tuple[dict[str, Tensor], Tensor]:
        """Outputs of the frozen units of each model for these samples, at most a microbatch of them."""
        size = self.size(microbatch)
        whole: dict[str, Tensor] = {}
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            filled = part if self.mixes else part[torch.arange(size) % len(part)]
            x = None if self._files else self._data.batch(filled)[0]
            for key, model in self._models.items():
                device = device_of(model)
                source = x if x is not None else device.move(self._files[key].read(filled))
                with device.autocast(self._dtype):
                    rows = model.run_units(self._units[key], source)[: len(part)]
                del source
                if len(part) == len(chosen):
                    whole[key] = rows
                    continue
                if key not in whole:
                    whole[key] = _room_for(len(chosen), rows)
                whole[key][start : start + len(part)] = rows
        return whole, device_of(self._models[""]).move(self._data.labels[chosen])

    def write(self, folder: Path, microbatch: int, order: torch.Generator | None) -> dict[str, RowFile]:
        """Files with the outputs for all samples, by model; `order` makes random groups where samples mix."""
        with ExitStack() as stack:
            files = {key: stack.enter_context(RowFile(folder)) for key in self._models}
            for chosen, filled in _groups(len(self._data), self.size(microbatch), order if self.mixes else None):
                outputs, _ = self.outputs(filled, len(filled))
                for key, rows in outputs.items():
                    files[key].write(chosen, rows[: len(chosen)])
            stack.pop_all()  # nothing failed: they stay open
        return files


def _following(start: str, units: list[str]) -> list[str]:
    return units[units.index(start) + 1 :] if start else units


def mixes_samples(module: nn.Module) -> bool:
    """Whether an output depends on the other samples of the batch, in evaluation mode as well."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None


def _room_for(count: int, rows: Tensor) -> Tensor:
    """Memory for `count` outputs like these, in the same layout."""
    shape = (count, *rows.shape[1:])
    return torch.empty(shape, dtype=rows.dtype, device=rows.device, memory_format=layout_of(rows))
