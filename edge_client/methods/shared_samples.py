"""Samples that all devices have, without labels: what FedMD and DraftFed learn from. Both halves share this.

The server reads them once, when the run begins, and keeps them in its memory (`public`); devices fetch them once. In
each round a window of them counts: the next `size`, in turn. A device answers for the window of the round with its new
model; the targets made of all answers reach it with its next assignment, and it learns from them before its own data.
With all devices in every round that is the papers' order exactly; otherwise targets are those of the last cohort.
Does not cover: what is answered and what is learnt (the method's file).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edge_client.config.run_file import RunFile
from edge_client.data.openers import input_shape, open_even_empty
from edge_client.device.accelerator import device_of
from edge_client.errors import InputError, NoSuchNameError
from edge_client.knowledge.kinds import PublicSamples, one
from edge_client.methods.base import Batch, Job, LeftOut, Outcome, Phase, Term
from edge_client.methods.fedper import PersonalClient, everything
from edge_client.models.contract import Model
from edge_client.models.taps import tapped
from edge_client.training.seeds import derive

__all__ = [
    "SharedSamples",
    "SharedSamplesClient",
    "load_public",
    "no_samples",
    "other_classes",
    "other_samples",
    "outputs",
    "window",
]

_LEARN = "learn"
_STATE = "learning/"
_CHUNK = 32


class SharedSamples:
    """The data of a phase; a sample's label is its position here, which is also that of its target."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self.labels = torch.arange(len(values))

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """x and positions."""
        return self._values[indices], self.labels[indices]


def window(round: int, total: int, size: int) -> Tensor:
    """The ids of a round's samples, ascending: the next `size` of `total`, in turn; 0: all."""
    if size == 0 or size >= total:
        return torch.arange(total)
    start = (round - 1) * size % total
    return torch.sort((start + torch.arange(size)) % total).values


@torch.no_grad()
def outputs(model: Model, x: Tensor, taps: Collection[str], size: int) -> tuple[dict[str, Tensor], Tensor]:
    """What a model in evaluation mode puts out at `taps`, and its logits, `size` samples at a time; on the host."""
    was_training, device = model.training, device_of(model)
    model.eval()
    results: dict[str, Tensor] = {}
    for start in range(0, len(x), size):  # into one place: all of them twice would be much
        seen, logits = tapped(model, taps, device.move(x[start : start + size]))
        for tap, value in {**{tap: seen[tap] for tap in taps}, "": logits}.items():
            results.setdefault(tap, torch.empty(len(x), *value.shape[1:]))[start : start + size] = value
    model.train(was_training)
    return {tap: results[tap] for tap in taps}, results[""]


class SharedSamplesClient(PersonalClient):
    """A model of the device's own that learns from targets for shared samples first, then from its own data."""

    def __init__(self) -> None:
        super().__init__(everything)
        self.public: Tensor | None = None
        self._learning: dict[str, dict[str, Tensor]] = {}  # state of the optimizer of that phase, kept as the model is

    def begin(self, job: Job) -> None:
        """Load the device's own model and the shared samples; knowledge is read once and kept."""
        super().begin(replace(job, knowledge=tuple(job.knowledge)))
        samples = one(self.job.knowledge, PublicSamples)
        self.public = samples.values if samples is not None else None
        if self.public is not None and tuple(self.public.shape[1:]) != tuple(job.model.input_shape):
            raise InputError(
                f"shared samples are {list(self.public.shape[1:])}, this device's are {list(job.model.input_shape)}; "
                "name a public set of that shape"
            )
        for key in job.state:
            if key.startswith(_STATE):
                name, _, field = key.removeprefix(_STATE).rpartition("/")
                self._learning.setdefault(name, {})[field] = job.state[key]

    def lesson(self) -> tuple[Tensor, int]:
        """Ids of the samples that there are targets for, and how many passes over them; none: nothing to learn."""
        raise NotImplementedError

    def phases(self) -> Sequence[Phase]:
        """Learning from targets leaves no trace in running statistics: shared samples are not the device's."""
        local = super().phases()
        ids, epochs = self.lesson()
        if self.public is None or epochs == 0 or len(ids) == 0:
            return local
        if int(ids[-1]) >= len(self.public):
            raise InputError(
                f"targets are for shared samples up to number {int(ids[-1])}, this device has {len(self.public)}"
            )
        learning = replace(
            local[0],
            name=_LEARN,
            epochs=epochs,
            data=SharedSamples(self.public[ids]),
            batchnorm="restore",
            optimizer_state=self._learning,
        )
        return [learning, *local]

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """The loss towards the targets, or cross entropy on the device's own data."""
        yield from self.learning_terms(batch) if phase.name == _LEARN else super().terms(batch, phase)

    def learning_terms(self, batch: Batch) -> Iterator[Term]:
        """The loss of shared samples; `batch.y` are positions in the targets."""
        raise NotImplementedError

    @property
    def chunk(self) -> int:
        """Samples that fit into memory at a time."""
        return self.job.plan.microbatch if self.job.plan is not None else _CHUNK

    def end(self) -> Outcome:
        """The model and both optimizers stay here."""
        outcome = super().end()
        optimizer_state = {
            f"{_STATE}{name}/{field}": t for name, tensors in self._learning.items() for field, t in tensors.items()
        }
        return replace(outcome, state={**outcome.state, **optimizer_state})


def no_samples(source: str) -> LeftOut:
    """The source of shared samples is empty."""
    detail = f"the shared samples {source!r} are none; devices learn from their own alone"
    return LeftOut(code="no_public", detail=detail)


def other_samples(device: str, ids: Tensor, round_ids: Tensor) -> LeftOut:
    """Answers for other samples than the round's; both are ascending."""
    described, expected = (f"{int(some[0])} to {int(some[-1])} ({len(some)})" for some in (ids, round_ids))
    detail = f"its answers are for shared samples {described}, the round's are {expected}; left out"
    return LeftOut(device=device, code="other_samples", detail=detail)


def other_classes(device: str, num_logits: int, num_classes: int) -> LeftOut:
    """Logits for another number of classes than the run's."""
    detail = f"its logits have {num_logits} numbers, the run has {num_classes} classes; they are left out"
    return LeftOut(device=device, code="class_count", detail=detail)


def load_public(text: str, run: RunFile, most: int) -> Tensor:
    """Shared samples of a data source on the server, as the run's model takes them; `most` of them, drawn once.

    Grey images get as many channels as the model wants, and images another size by interpolation. Labels are not read.
    An empty source is no error: devices have their own samples.
    """
    if not text:
        raise InputError(
            f'method {run.method.name!r} needs shared samples: name them, such as public = "npz:/srv/public.npz" '
            f"in [method] (on the server)"
        )
    shape = tuple(run.model.input) if run.model is not None else None
    try:
        data = open_even_empty(text, shape=shape)
    except (InputError, NoSuchNameError) as error:
        raise InputError(f"method {run.method.name!r}: public: {error}") from None
    where = f"method {run.method.name!r}: public = {text!r}"
    sample_shape = input_shape(data.shape) or shape
    if sample_shape is None:
        raise InputError(f"{where}: how large is a sample? name a source whose files tell it")
    rng = np.random.Generator(np.random.PCG64(derive(run.seed, "public")))
    total = len(data.labels.values)
    if total == 0:
        return torch.empty(0, *(shape or sample_shape))
    indices = np.sort(rng.permutation(total)[:most])
    rows, convert = data.rows(indices, sample_shape)
    values = torch.from_numpy(np.ascontiguousarray(convert(rows.take(np.arange(len(indices)))))).reshape(
        -1, *sample_shape
    )
    return _as_input(values, shape, where)


def _as_input(values: Tensor, shape: tuple[int, ...] | None, where: str) -> Tensor:
    if shape is None or tuple(values.shape[1:]) == shape:
        return values
    if values.ndim != 4 or len(shape) != 3 or values.shape[1] not in (1, shape[0]):
        sample_shape, input_shape = list(values.shape[1:]), list(shape)
        raise InputError(f"{where}: samples are {sample_shape}, the run's model takes {input_shape}; name others")
    values = values.expand(-1, shape[0], -1, -1)
    return functional.interpolate(values, size=shape[1:], mode="bilinear", align_corners=False)
