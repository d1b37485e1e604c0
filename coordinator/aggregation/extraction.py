"""How the server extracts the slices of a run's model, and where their tensors lie in its container. Imports torch.

With `sharing = "position"` the server has one model, and a slice is a part of it. With `"architecture"` it has a model
for each slice, side by side in one container: the names of their tensors begin with `slice:SLICE/`.
Does not cover: which device trains which slice (`slice_choice`), how updates are combined (`frozen`, `methods`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from coordinator.aggregation.task_source import recipe_of
from edge_client.config.run_file import RunFile
from edge_client.methods import coverage, registry
from edge_client.methods.base import Client, Job, Method
from edge_client.methods.slices import WHOLE_MODEL, Place, slice_places
from edge_client.models.contract import Model
from edge_client.models.normalised import number_names
from edge_client.models.slicing import parse, take_tensor
from edge_client.records import to_map
from edge_client.task.run_model import Recipe, fill
from edge_client.training.loop import generator
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX, Entry, Header, TableRow, codec_rule
from edge_client.wire.tensors import ContainerReader

__all__ = ["SliceExtractor", "extractor_of", "prefix_of"]

_TRAVELLING = (MODEL_PREFIX, EXTRA_PREFIX)  # not the server's memory
_MAX_CACHED_PLACES = 64  # slices: a rolling window makes new ones in every round

_EXTRACTORS: dict[str, SliceExtractor] = {}  # that of the newest run


def extractor_of(run: RunFile, task: str | None) -> SliceExtractor:
    """The extractor of a run whose task lies at `task`; kept until another run asks for its own."""
    key = json.dumps([to_map(run), task], sort_keys=True)
    if key not in _EXTRACTORS:
        _EXTRACTORS.clear()
        _EXTRACTORS[key] = SliceExtractor(recipe_of(run, task))
    return _EXTRACTORS[key]


def prefix_of(slice_name: str) -> str:
    """How the tensor names of a slice begin where every slice is a model of its own."""
    return "" if slice_name == WHOLE_MODEL else f"slice:{slice_name}/"


class SliceExtractor:
    """The slices of one run."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.method: Method = registry.of_run(recipe.run)
        self.architectures = registry.architectures(recipe.run)
        self.has_separate_models = registry.sharing(recipe.run) == "architecture"
        self._meta_model: Model | None = None
        self._never_returned: dict[str, tuple[str, ...]] = {}  # by slice, where each is a model of its own
        self._places: dict[tuple[str, int], Mapping[str, Place]] = {}

    def of_another_run(self, run: RunFile) -> SliceExtractor:
        """The extractor of a run with the same model and another method, other slices or other sharing."""
        architectures, sharing = registry.architectures(run), registry.sharing(run)
        file = replace(self._recipe.run, method=run.method, slices=architectures, models=run.models, sharing=sharing)
        return SliceExtractor(replace(self._recipe, run=file))

    def places(self, slice_name: str, names: Sequence[str]) -> Mapping[str, Place]:
        """Tensor of a slice -> where it lies among the tensors of the server's one model; raises `InputError`."""
        is_whole = slice_name == WHOLE_MODEL and self.architectures == (WHOLE_MODEL,)
        if is_whole and self.method.slices.places is slice_places:
            return {name: Place(name) for name in names}
        key = (slice_name, hash(tuple(names)))
        if key not in self._places:
            if self._meta_model is None:
                self._meta_model = self._recipe.build_weights().to("meta")  # only its shapes are needed
            if len(self._places) >= _MAX_CACHED_PLACES:
                self._places.clear()
            self._places[key] = self.method.slices.places(self._meta_model, slice_name, names)
        return self._places[key]

    def sources(self, slice_name: str, header: Header) -> Mapping[str, Place]:
        """Tensor of a slice -> where a server's container with this header has it."""
        return self.sources_among(slice_name, [entry.name for entry in header.entries])

    def sources_among(self, slice_name: str, stored_names: Sequence[str]) -> Mapping[str, Place]:
        """The same in a container whose tensors have these names."""
        if not self.has_separate_models:
            return self.places(slice_name, [name for name in stored_names if name.startswith(_TRAVELLING)])
        prefix = prefix_of(slice_name)
        names = [name for name in stored_names if name.startswith(prefix or _TRAVELLING)]
        return {name.removeprefix(prefix): Place(name) for name in names}

    def table(self, slice_name: str, header: Header, codec: str) -> list[TableRow]:
        """The table of the container in which a slice travels."""
        entries = {entry.name: entry for entry in header.entries}
        return [
            (name, codec_rule(len(entry.shape), codec, integer=entry.codec == "i64"), _shape(entry, place))
            for name, place in self.sources(slice_name, header).items()
            for entry in (entries[place.name],)
        ]

    def meta(self, slice_name: str, header: Header) -> Mapping[str, Any]:
        """The `meta` of that container; a slice that is a model of its own has its own tensors that never return."""
        if not self.has_separate_models or slice_name == WHOLE_MODEL or not coverage.never_returned(header.meta):
            return header.meta
        if slice_name not in self._never_returned:
            model = self.separate_model(slice_name)
            self._never_returned[slice_name] = self.never_returned(model)
        return coverage.with_never_returned(header.meta, self._never_returned[slice_name])

    def never_returned(self, model: Model) -> tuple[str, ...]:
        """Prefixes of the tensors that no device sends back: by the method, and those that never change."""
        normalised = self._recipe.run.train.normalise
        numbers = [MODEL_PREFIX + name for name in number_names(model)] if normalised else []
        return (*self.method.travel.never_returned(model), *numbers)

    def separate_model(self, slice_name: str) -> Model:
        """A slice as a model of its own, whose weights mean nothing."""
        assert self._recipe.input_shape is not None  # without it the model has no slices
        return self._recipe.build(self._recipe.input_shape, parse(slice_name))

    def tensors(self, slice_name: str, reader: ContainerReader) -> Iterator[Tensor]:
        """The values of a slice's tensors one at a time, in the order of `table`."""
        for place in self.sources(slice_name, reader.header).values():
            yield take_tensor(reader.tensor(place.name), place.where)

    def fill(self, model: Model, slice_name: str, reader: ContainerReader) -> None:
        """Fill a slice's model with its tensors."""
        fill(model, zip(self.sources(slice_name, reader.header), self.tensors(slice_name, reader), strict=True))

    def client(self, slice_name: str, model: Model, reader: ContainerReader) -> Client:
        """The client half of the method on a device with this slice, ready to predict."""
        sent = zip(self.sources(slice_name, reader.header), self.tensors(slice_name, reader), strict=True)
        extra = {name.removeprefix(EXTRA_PREFIX): value for name, value in sent if name.startswith(EXTRA_PREFIX)}
        client, run = self.method.client(), self._recipe.run
        network = parse(self.method.slices.network(slice_name))
        job = Job(
            model=model,
            round=1,
            num_rounds=1,
            epochs=0,
            learning_rate=0.0,
            class_counts=(0,) * len(run.classes),
            slice=slice_name,
            rng=lambda purpose: generator(run.seed, purpose),
            extra=extra,
            build=lambda purpose: self._recipe.build(model.input_shape, network),
        )
        client.begin(job)
        return client


def _shape(entry: Entry, place: Place) -> Sequence[int]:
    return entry.shape if place.where is None else [len(indices) for indices in place.where]
