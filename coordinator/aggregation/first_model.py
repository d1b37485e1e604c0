"""The aggregator's job `init`: the first model of a run. Imports torch.

A run begins with random weights, which are a function of its seed, or with the tensors of another run's model
(`warm_start`). The container of version 0 has all that the server keeps: the model, the method's extra tensors, a model
for every slice where these are separate, and the server's memory of knowledge.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordinator.aggregation import pretrained, warm_start
from coordinator.aggregation.extraction import SliceExtractor, extractor_of, prefix_of
from coordinator.aggregation.jobs import InitJob, WrittenFile
from coordinator.aggregation.knowledge import first_memory
from coordinator.aggregation.output import write_output
from coordinator.aggregation.task_source import recipe_of
from edge_client.config.run_file import FILE_INIT, RunFile
from edge_client.errors import InputError
from edge_client.methods import coverage, user_methods
from edge_client.methods.base import Method
from edge_client.methods.slices import WHOLE_MODEL
from edge_client.models.contract import Model
from edge_client.models.found_units.model import FoundModel
from edge_client.models.slicing import parse, take_tensor
from edge_client.task.run_model import Recipe
from edge_client.training import seeds
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX
from edge_client.wire.tensors import codec_for

__all__ = ["check_first_model", "make_first_model"]


def check_first_model(run: RunFile, task: str | None) -> None:
    """Make the first model of a run and drop it; raises what a coordinator would report when the run's turn comes.

    The run's task, if it has one, lies at `task`. The model that the run starts from (`init`) is not looked at.
    """
    with user_methods.guard(run.method.name, "the server's init"):
        _first_tensors(InitJob(run=run, task=task, out=""))


def make_first_model(job: InitJob) -> WrittenFile:
    """Write version 0 of a run."""
    tensors, meta = _first_tensors(job)
    table = [(name, codec_for(value, "fp32"), value.shape) for name, value in tensors.items()]
    return write_output(job.out, table, iter(tensors.values()), meta)


def _first_tensors(job: InitJob) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """All tensors of version 0 by their names in the container, and its `meta`."""
    recipe, extractor = recipe_of(job.run, job.task), extractor_of(job.run, job.task)
    method = extractor.method
    _seed_generators(seeds.derive(job.run.seed, "init"))
    model = recipe.build_weights()
    method.check(model)
    _check_slices(recipe, extractor.architectures, model)
    method.slices.first_weights(model, lambda slice_name: recipe.build(model.input_shape, parse(slice_name)))
    if job.start is not None:
        warm_start.load_weights(job, model, extractor)
    elif job.run.init.startswith(FILE_INIT):
        pretrained.load(model, job.run)
    tensors: dict[str, Tensor] = {MODEL_PREFIX + name: value for name, value in model.state_dict().items()}
    _seed_generators(seeds.derive(job.run.seed, "extra"))
    tensors |= _extra_tensors(method, model)
    if job.start is not None and method.travel.inherits_extra:
        tensors |= warm_start.inherited_extra(tensors, job.start)
    tensors |= _separate_models(recipe, extractor, tensors)
    if job.start is not None and job.start_run is not None:
        warm_start.copy_slices(tensors, job, extractor, extractor.of_another_run(job.start_run))
    tensors |= first_memory(method.knowledge.teacher, job.run)
    meta = coverage.model_meta(
        method.plans,
        stem=model.order[0],
        never_returned=extractor.never_returned(model),
        notes=method.travel.notes(model),
        units=model.found if isinstance(model, FoundModel) and hasattr(model, "units") else None,
    )
    return tensors, meta


def _seed_generators(seed: int) -> None:
    """Seed every global generator that a user's model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _extra_tensors(method: Method, model: Model) -> dict[str, Tensor]:
    return {EXTRA_PREFIX + name: value for name, value in method.travel.extra_tensors(model).items()}


def _check_slices(recipe: Recipe, architectures: Sequence[str], model: Model) -> None:
    """Raise `InputError` for slices that devices could not build."""
    if tuple(architectures) != (WHOLE_MODEL,) and not hasattr(model, "units"):
        raise InputError(
            f"slices: the server cannot cut {', '.join(architectures)} out of a task's model without the shape of a "
            "sample; tell it, Task(input=(3, 96, 96)), or leave slices out"
        )
    for spec in map(parse, architectures):
        if spec.exit is not None:  # only the model itself knows whether it can end there
            with torch.random.fork_rng(devices=[]):
                recipe.build(model.input_shape, spec)


def _separate_models(recipe: Recipe, extractor: SliceExtractor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The models of slices that have one of their own; raises `InputError` for a slice that cannot be trained."""
    separate: dict[str, Tensor] = {}
    for architecture in extractor.architectures:
        is_other_model = bool(parse(architecture).model)
        places = {} if is_other_model else extractor.places(architecture, list(tensors))
        if not extractor.has_separate_models:
            continue
        extractor.method.check(extractor.separate_model(architecture))
        if architecture == WHOLE_MODEL:
            continue
        if is_other_model:
            values = _other_model(recipe, extractor.method, architecture)
        else:
            values = {name: take_tensor(tensors[place.name], place.where).clone() for name, place in places.items()}
        separate |= {prefix_of(architecture) + name: value for name, value in values.items()}
    return separate


def _other_model(recipe: Recipe, method: Method, architecture: str) -> dict[str, Tensor]:
    """The first tensors of a built-in model that is no part of the run's: a function of the run's seed and its name."""
    assert recipe.input_shape is not None  # or `_check_slices` had refused it
    _seed_generators(seeds.derive(recipe.run.seed, "init", architecture))
    model = recipe.build(recipe.input_shape, parse(architecture))
    tensors = {MODEL_PREFIX + name: value for name, value in model.state_dict().items()}
    return tensors | _extra_tensors(method, model)
