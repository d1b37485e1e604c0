"""A run's model and method on random samples, warmed up as in a worker, for calibrations and trials to measure.

Covers: building, layout, warm-up, a client half that has begun. Does not cover: what is measured (`calibration`,
`trial`). Imports torch: malloc must be pinned before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from edge_client.config.device_file import DataSection
from edge_client.config.run_file import RunFile
from edge_client.config.task_files import split_place
from edge_client.data.sources import open_data
from edge_client.knowledge.kinds import Knowledge
from edge_client.methods import registry
from edge_client.methods.base import Client, Job, Method
from edge_client.models.contract import Model
from edge_client.models.layout import allows_channels_last, to_channels_last
from edge_client.models.slicing import parse
from edge_client.records import TrainingPlan
from edge_client.task.run_model import Recipe, recipe
from edge_client.task.task import read_source
from edge_client.training import optimizers
from edge_client.training.loop import Settings, generator
from edge_client.training.warmup import warm_up
from edge_client.wire.container import EXTRA_PREFIX

__all__ = ["PreparedTraining", "RandomSamples", "prepare"]

# All that a worker loads: the base memory of a worker is measured in this process, and nothing else is used of it.
import_module("edge_client.worker.assignment")


class RandomSamples:
    """Random samples, which take no memory beyond the batch in use."""

    def __init__(self, shape: Sequence[int], num_samples: int, num_classes: int) -> None:
        self._shape = tuple(shape)
        self.labels = torch.arange(num_samples) % num_classes

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """New random numbers at every call."""
        return torch.rand(len(indices), *self._shape), self.labels[indices]


class _ParameterCopies(Mapping[str, Tensor]):
    """The model's parameters as if they were read from the file that they came in: new memory at every call."""

    def __init__(self, model: Model, extra: Mapping[str, Tensor]) -> None:
        self._tensors = {**dict(model.named_parameters()), **{EXTRA_PREFIX + name: extra[name] for name in extra}}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].detach().clone(memory_format=torch.contiguous_format)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTraining:
    """A model that is laid out and warmed up, and the method that trains it."""

    run: RunFile
    recipe: Recipe
    model: Model
    method: Method
    channels_last: bool
    dtype: str = "fp32"
    slice: str = "full"

    @property
    def num_classes(self) -> int:
        """Classes of the run."""
        return len(self.run.classes)

    def samples(self, num_samples: int) -> RandomSamples:
        """Random samples of the model's shape."""
        return RandomSamples(self.model.input_shape, num_samples, self.num_classes)

    def client(
        self, plan: TrainingPlan, *, epochs: int = 1, round: int = 1, knowledge: Iterable[Knowledge] = ()
    ) -> Client:
        """The method's client half, begun with a plan."""
        client, section, extra = self.method.client(), self.run.train, self._extra()
        job = Job(
            model=self.model,
            round=round,
            num_rounds=round,
            epochs=epochs,
            learning_rate=0.0,
            class_counts=(1,) * self.num_classes,
            slice=self.slice,
            plan=plan,
            rng=lambda purpose: generator(0, purpose),
            extra=extra,
            received=_ParameterCopies(self.model, extra),
            build=self._build_another,
            data=self.samples(plan.microbatch),
            knowledge=knowledge,
            optimizer=partial(
                optimizers.make, section.optimizer, momentum=section.momentum, weight_decay=section.weight_decay
            ),
        )
        client.begin(job)
        return client

    def _extra(self) -> Mapping[str, Tensor]:
        """The method's tensors as they would come with the slice."""
        of_slice = self.method.travel.extra_of_slice
        return self.method.travel.extra_tensors(self.model) if of_slice is None else of_slice(self.model, self.slice)

    def _build_another(self, purpose: str) -> Model:
        model = self.recipe.build(self.model.input_shape, parse(self.method.slices.network(self.slice)))
        if self.channels_last:
            to_channels_last(model)
        model.recompute = self.model.recompute
        return model

    def settings(self, batch: int, plan: TrainingPlan, folder: Path | None = None) -> Settings:
        """The run's training settings, with a learning rate of 0: weights stay as they are."""
        section = self.run.train
        return Settings(
            batch=batch,
            microbatch=plan.microbatch,
            learning_rate=0.0,
            seed=0,
            optimizer=section.optimizer,
            momentum=section.momentum,
            weight_decay=section.weight_decay,
            buffered=plan.buffered and folder is not None,
            folder=folder,
            channels_last=self.channels_last,
            dtype=self.dtype,
        )


def prepare(
    run: RunFile, input_shape: Sequence[int], *, task: str | None = None, slice_name: str = "full", dtype: str = "fp32"
) -> PreparedTraining:
    """Build the run's model or a slice of it, lay it out, warm the process up; raises `InputError`."""
    torch.set_num_threads(run.train.threads)
    _open_some_data()
    source = read_source(*split_place(task, is_blob=True)) if task is not None else None
    model_recipe = recipe(run, source)
    method = registry.of_run(run)
    model = model_recipe.build(input_shape, parse(method.slices.network(slice_name)))
    channels_last = allows_channels_last(model)
    if channels_last:
        to_channels_last(model)
    prepared = PreparedTraining(
        run=run,
        recipe=model_recipe,
        model=model,
        method=method,
        channels_last=channels_last,
        dtype=dtype,
        slice=slice_name,
    )
    with model_recipe.user_code("training it on two samples"):
        warm_up(model, prepared.settings(1, TrainingPlan(microbatch=1, budget_bytes=0, predicted_bytes=0)))
    return prepared


def _open_some_data() -> None:
    """Load the libraries that a worker loads to open its data: they stay in memory."""
    section = DataSection(source="digits", partition="dirichlet:1", part=(0, 2))
    open_data(section, tuple(str(digit) for digit in range(10)), (1, 8, 8), {})
