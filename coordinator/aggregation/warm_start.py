"""A run that starts from another run's model: its tensors in place of random ones. Imports torch.

The weights of the model must fit, or the run is refused. The extra tensors of a method are taken if the other run has
all of them. What belongs to one slice alone is taken from the same slice of the other run, wherever that keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from coordinator.aggregation.extraction import SliceExtractor
from coordinator.aggregation.jobs import InitJob
from edge_client.config.run_file import RunFile
from edge_client.errors import InputError
from edge_client.methods.slices import WHOLE_MODEL
from edge_client.models.contract import Model
from edge_client.models.slicing import parse, take_tensor
from edge_client.task.run_model import fill
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX, TableRow
from edge_client.wire.tensors import ContainerReader, codec_for

__all__ = ["copy_slices", "inherited_extra", "load_weights"]


def load_weights(job: InitJob, model: Model, extractor: SliceExtractor) -> None:
    """Fill the run's model with the weights of its start; raises `InputError` if that is another model."""
    state = model.state_dict()
    table = [(MODEL_PREFIX + name, codec_for(value, "fp32"), value.shape) for name, value in state.items()]
    with ContainerReader(Path(str(job.start))) as reader:
        _check_same_model(table, reader, job.run)
        if job.start_run is not None:
            _check_same_networks(job.run, extractor, extractor.of_another_run(job.start_run))
        fill(model, ((name, reader.tensor(name)) for name in reader.names(MODEL_PREFIX)))


def _check_same_model(table: Sequence[TableRow], start: ContainerReader, run: RunFile) -> None:
    """Raise `InputError` with the first difference between the run's model and its start."""
    entries = {entry.name: entry for entry in start.header.entries if entry.name.startswith(MODEL_PREFIX)}
    expected = {name for name, _, _ in table}
    problem = next((f"it has {_shown(name)}, the run's model has not" for name in entries if name not in expected), "")
    for name, codec, shape in table:
        if name not in entries:
            problem = f"it has no {_shown(name)}"
        elif tuple(entries[name].shape) != tuple(shape) or (entries[name].codec == "i64") != (codec == "i64"):
            problem = f"its {_shown(name)} is {list(entries[name].shape)}, the run's model has {list(shape)}"
        else:
            continue
        break
    if problem:
        raise InputError(f"init = {run.init!r} is another model than {run.what!r}: {problem}")


def _shown(name: str) -> str:
    return repr(name.removeprefix(MODEL_PREFIX)[:80])


def _check_same_networks(run: RunFile, extractor: SliceExtractor, other: SliceExtractor) -> None:
    """Raise `InputError` if the method trains networks side by side that the other run's model is not made of."""
    network = extractor.method.slices.network(WHOLE_MODEL)
    if network not in (WHOLE_MODEL, other.method.slices.network(WHOLE_MODEL)):
        raise InputError(
            f"init = {run.init!r}: {run.method.name!r} has networks of {network} side by side, and the model "
            "of that run is not made of such; start from a run with the same method and bases, or leave init out"
        )


def inherited_extra(tensors: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    """The method's extra tensors of the start if it has all of them; nothing if they belong to another method."""
    extra = {name: value for name, value in tensors.items() if name.startswith(EXTRA_PREFIX)}
    with ContainerReader(Path(start)) as reader:
        shapes = {entry.name: tuple(entry.shape) for entry in reader.header.entries}
        if any(shapes.get(name) != tuple(value.shape) for name, value in extra.items()):
            return {}
        return {name: reader.tensor(name) for name in extra}


def copy_slices(tensors: Mapping[str, Tensor], job: InitJob, extractor: SliceExtractor, other: SliceExtractor) -> None:
    """Overwrite the tensors that belong to one slice alone with those of the same slice of the other run."""
    assert job.start_run is not None
    with ContainerReader(Path(str(job.start))) as reader:
        for architecture in extractor.architectures:
            if not _is_same_network(architecture, extractor, other):
                continue
            if job.run.section(architecture) != job.start_run.section(architecture) and parse(architecture).model:
                raise InputError(
                    f"init = {job.run.init!r}: the slice {architecture!r} is another model there; call this run's "
                    "otherwise, and it begins at random"
                )
            sources = other.sources(architecture, reader.header)
            for name, place in extractor.sources_among(architecture, list(tensors)).items():
                is_of_slice = name.startswith(MODEL_PREFIX) and not place.name.startswith(MODEL_PREFIX)
                if is_of_slice and name in sources and place.where is None:
                    source = sources[name]
                    tensors[place.name].copy_(take_tensor(reader.tensor(source.name), source.where))


def _is_same_network(architecture: str, extractor: SliceExtractor, other: SliceExtractor) -> bool:
    """Whether both runs have the slice, and devices train it as one network in both."""
    if architecture not in other.architectures:
        return False
    return all(one.method.slices.network(architecture) == architecture for one in (extractor, other))
