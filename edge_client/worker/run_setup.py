"""Which method and which model a run trains on this device, and whether the device's owner allows both.

A task is code: its file is read only if the owner named it in device.toml, and run only if its hash is the run's.
Covers: permissions, method, recipe of the model, slice. Does not cover: building the model (`model_building`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_client.config.task_files import split_place
from edge_client.errors import InputError
from edge_client.methods import registry as methods
from edge_client.methods.base import Method
from edge_client.methods.coverage import found_units
from edge_client.methods.slices import architecture
from edge_client.models.found_units.adoption import remember
from edge_client.models.found_units.result import FoundUnits
from edge_client.models.slicing import SliceSpec, parse
from edge_client.task.run_model import Recipe, recipe
from edge_client.task.task import Source, read_source
from edge_client.wire.container import read_header
from edge_client.worker.declined import DeclinedError, declines
from edge_client.worker.order_files import Assignment
from edge_client.worker.process_cache import ProcessCache

__all__ = ["RunSetup", "set_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """What is to be trained; nothing of it has memory yet."""

    method: Method
    recipe: Recipe  # of the model
    spec: SliceSpec  # the part of the model that this device trains
    architecture: str
    tensor_sizes: Sequence[int]  # elements of each parameter and buffer; empty for a task's model: not known yet
    cache_key: Sequence[str]  # of what is the same in all assignments of a run that train this architecture


def set_up(assignment: Assignment, cache: ProcessCache) -> RunSetup:
    """Check what the owner allows, then resolve the names in the run; raises `DeclinedError`."""
    order, run = assignment.order, assignment.run
    if assignment.only_evaluates and not assignment.device.share.metrics:
        raise DeclinedError("not_shared", "this device's owner keeps its test results (share.metrics = false)")
    with declines("bad_method", unknown="unknown_method"):
        method = methods.of_run(run)
    _check_knowledge_may_leave(assignment)
    with declines("bad_task"):
        model_recipe = replace(recipe(run, _task_source(assignment)), units=_found_units(assignment))
    with declines("bad_model", unknown="unknown_model"):
        spec, kind = parse(method.slices.network(order.slice)), architecture(order.slice)
        cache_key = [order.parts["run"], kind]
        sizes = cache.once("sizes", cache_key, lambda: model_recipe.parameter_sizes(spec))
    return RunSetup(
        method=method, recipe=model_recipe, spec=spec, architecture=kind, tensor_sizes=sizes, cache_key=cache_key
    )


def _found_units(assignment: Assignment) -> FoundUnits | None:
    """Units of the model that came with it; kept for a calibration, which has no model file."""
    order = assignment.order
    paths = [order.parts[key] for key in ("model", f"slice:{order.slice}") if key in order.parts]
    units = found_units(read_header(Path(paths[0])).meta) if paths else None
    if units is not None:
        remember(units)
    return units


def _check_knowledge_may_leave(assignment: Assignment) -> None:
    """Decline a method whose knowledge the owner keeps, before anything is trained, and in a dry run, too."""
    method = assignment.run.method
    rules = methods.knowledge(method.name, method.parameters)
    if rules is None or assignment.only_evaluates:
        return
    refusal = assignment.gate.refusal(rules.kinds)
    if refusal is not None:
        raise DeclinedError(refusal.code, refusal.detail)


def _task_source(assignment: Assignment) -> Source | None:
    """The file of the run's task as the owner allows it; None if the run trains a built-in model."""
    section = assignment.run.task
    if section is None:
        return None
    place = assignment.device.tasks.get(section.name)
    if place is None:
        raise DeclinedError(
            "task_missing",
            f"task {section.name!r} is not allowed on this device; put its file there, write into device.toml, "
            f'and start the client again: tasks = {{ {section.name} = "/path/{section.name}.py:task" }}',
        )
    try:
        source = read_source(*split_place(place))
    except InputError as error:
        raise DeclinedError("task_missing", f"{error}; it is tasks.{section.name} of device.toml") from error
    if source.sha256 != section.sha256:
        raise DeclinedError(
            "task_differs",
            f"{source.path} has sha256 {source.sha256}, the run's task {section.name!r} has "
            f"{section.sha256 or 'none'}; copy the server's file here",
        )
    return source
