"""The slices of a run's model as the aggregator cuts them, and where what comes back belongs. Imports torch.

With `sharing = "position"` the server has one model, and a slice is a part of it. With `"architecture"` it has one for
each slice, side by side in one container: the names of their tensors begin with `slice:SLICE/`.
Does not cover: who gets which slice (`slice_choice`), what is made of the updates (`frozen`, `methods`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from edge_client.config.run_file import RunFile
from edge_client.methods import coverage, registry
from edge_client.methods.base import Client, Job, Method
from edge_client.methods.slices import WHOLE_MODEL, Place, slice_places
from edge_client.models.contract import Model
from edge_client.models.slicing import parse, take_tensor
from edge_client.task.run_model import Recipe
from edge_client.training.loop import generator
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX, Entry, Header, TableRow, codec_rule
from edge_client.wire.tensors import ContainerReader

__all__ = ["Cutter", "beginning"]

_TRAVEL = (MODEL_PREFIX, EXTRA_PREFIX)  # not the server's memory
_MOST_KNOWN = 64  # slices: with a rolling window there are new ones in every round


def beginning(cut: str) -> str:
    """What the names of a slice's own tensors begin with, where each slice is a model of its own."""
    return "" if cut == WHOLE_MODEL else f"slice:{cut}/"


class Cutter:
    """The slices of one run."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.method: Method = registry.of_run(recipe.run)
        self.rungs = registry.rungs(recipe.run)
        self.apart = registry.sharing(recipe.run) == "architecture"  # every slice is a model of its own
        self._model: Model | None = None
        self._kept: dict[str, tuple[str, ...]] = {}  # slice that is a model of its own -> what never comes back
        self._known: dict[tuple[str, int], Mapping[str, Place]] = {}

    def of_another(self, run: RunFile) -> Cutter:
        """How another run with this model cuts it."""
        rungs, sharing = registry.rungs(run), registry.sharing(run)
        theirs = replace(self._recipe.run, method=run.method, slices=rungs, models=run.models, sharing=sharing)
        return Cutter(replace(self._recipe, run=theirs))

    def places(self, cut: str, names: Sequence[str]) -> Mapping[str, Place]:
        """Tensor of a slice -> where it lies among the tensors of the server's one model; raises `InputError`."""
        if cut == WHOLE_MODEL and self.rungs == (WHOLE_MODEL,) and self.method.slices.places is slice_places:
            return {name: Place(name) for name in names}
        key = (cut, hash(tuple(names)))
        if key not in self._known:
            if self._model is None:
                self._model = self._recipe.build_weights().to("meta")  # its values are of no use
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self.method.slices.places(self._model, cut, names)
        return self._known[key]

    def sources(self, cut: str, header: Header) -> Mapping[str, Place]:
        """Tensor of a slice -> where a server's container with this header has it."""
        return self.sources_in(cut, [entry.name for entry in header.entries])

    def sources_in(self, cut: str, stored: Sequence[str]) -> Mapping[str, Place]:
        """The same in a container of tensors with these names."""
        if not self.apart:
            return self.places(cut, [name for name in stored if name.startswith(_TRAVEL)])
        own = beginning(cut)
        names = [name for name in stored if name.startswith(own or _TRAVEL)]
        return {name.removeprefix(own): Place(name) for name in names}

    def table(self, cut: str, header: Header, codec: str) -> list[TableRow]:
        """What the container of a slice lists."""
        entries = {entry.name: entry for entry in header.entries}
        return [
            (name, codec_rule(len(entry.shape), codec, integer=entry.codec == "i64"), _shape(entry, place))
            for name, place in self.sources(cut, header).items()
            for entry in (entries[place.name],)
        ]

    def meta(self, cut: str, header: Header) -> Mapping[str, Any]:
        """What the container of a slice says of it; a slice that is a model of its own keeps other tensors back."""
        if not self.apart or cut == WHOLE_MODEL or not coverage.kept(header.meta):
            return header.meta
        if cut not in self._kept:
            self._kept[cut] = self.method.travel.never_returned(self.own_model(cut))
        return coverage.keeping(header.meta, self._kept[cut])

    def own_model(self, cut: str) -> Model:
        """A slice as a model of its own, with weights of no use."""
        assert self._recipe.input_shape is not None  # without it the model has no slices
        return self._recipe.build(self._recipe.input_shape, parse(cut))

    def tensors(self, cut: str, reader: ContainerReader) -> Iterator[Tensor]:
        """Their values, one at a time, in that order."""
        for place in self.sources(cut, reader.header).values():
            yield take_tensor(reader.tensor(place.name), place.where)

    def client(self, cut: str, model: Model, reader: ContainerReader) -> Client:
        """A device with this slice, given its model, as far as it answers."""
        received = zip(self.sources(cut, reader.header), self.tensors(cut, reader), strict=True)
        extra = {name.removeprefix(EXTRA_PREFIX): value for name, value in received if name.startswith(EXTRA_PREFIX)}
        client, run = self.method.client(), self._recipe.run
        job = Job(
            model=model,
            round=1,
            num_rounds=1,
            epochs=0,
            learning_rate=0.0,
            class_counts=(0,) * len(run.classes),
            slice=cut,
            rng=lambda purpose: generator(run.seed, purpose),
            extra=extra,
            build=lambda purpose: self._recipe.build(model.input_shape, parse(self.method.slices.network(cut))),
        )
        client.begin(job)
        return client


def _shape(entry: Entry, place: Place) -> Sequence[int]:
    return entry.shape if place.where is None else [len(indices) for indices in place.where]
