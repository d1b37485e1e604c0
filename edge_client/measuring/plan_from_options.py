"""The plan for a model and a budget that were typed as options: what `edge-client plan` and `edge-client bench` share.

Covers: reading the options, measuring the model (once, then cached), asking the planner, showing the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client import durable
from edge_client.config.quantities import format_bytes, parse_bytes
from edge_client.config.run_file import RunFile
from edge_client.config.shape_text import typed_shape
from edge_client.config.tables import parse_table
from edge_client.config.task_files import split_place
from edge_client.device import report
from edge_client.errors import InputError
from edge_client.measuring.calibration import calibrated, job_for
from edge_client.measuring.plan_search import PlanSearch
from edge_client.methods import registry as methods
from edge_client.models import registry as models
from edge_client.planning.planner import Candidate, Choice, whole_batch_bytes
from edge_client.records import PlanRules
from edge_client.task.task import read_source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Subject", "describe", "find_plan", "parse_size", "read_subject", "to_json"]

_SAMPLES = 1000  # of the epoch whose time is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, how it is trained, and what a method allows."""

    run: RunFile
    rules: PlanRules
    input_shape: tuple[int, ...]
    architectures: tuple[str, ...] = ("full",)  # slices that a device may train, the largest first
    task: str | None

    def search(self, *, slice_name: str = "full", num_samples: int = 0, disk_bytes: int = 0) -> PlanSearch:
        """Plans of an architecture, with rows from the cache, or measured now; raises `MachineError` if that fails.

        Activations may lie on disk if there are samples and room for them.
        """
        job = job_for(self.run, self.rules, self.input_shape, task=self.task, slice_name=slice_name)
        rows = calibrated(job, durable.cache_dir())
        return PlanSearch(
            run=self.run,
            rules=self.rules,
            slice_name=slice_name,
            rows=rows,
            num_samples=num_samples,
            disk_bytes=disk_bytes,
        )

    def search_for(self, budget: int | None, training: int | None) -> tuple[PlanSearch, int]:
        """Plans of the slice that a device with such a budget trains, and what its training may take."""
        for slice_name in self.architectures:
            search = self.search(slice_name=slice_name)
            room = training if training is not None else max(0, (budget or 0) - search.rows.worker_bytes)
            if whole_batch_bytes(search.rows, search.workload()) <= room:
                break
        return search, room


def read_subject(options: argparse.Namespace) -> Subject:
    """What the options name; raises `InputError` or `NoSuchNameError`."""
    if not 1 <= options.batch <= 65_536:
        raise InputError(f"--batch: expected 1 to 65536 samples, got {options.batch}")
    if not 2 <= options.classes <= 100_000:
        raise InputError(f"--classes: expected 2 or more, got {options.classes}")
    table: dict[str, Any] = {
        "name": "plan",
        "classes": [str(number) for number in range(options.classes)],
        "train": {"batch": options.batch, "optimizer": options.optimizer, "momentum": options.momentum},
    }
    settings = dict(_setting(text) for text in options.set)
    if options.model is not None:
        known = {f.name.replace("_", "-") for f in dataclasses.fields(models.options_type(options.model))}
        named = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
        others = [(key, value) for key, value in settings.items() if not key.startswith("model.")]
        settings = {key.removeprefix("method."): value for key, value in others}
        model_options = named | {key: value for key, value in settings.items() if key.replace("_", "-") in known}
        shape = typed_shape(options.input) or models.default_input(options.model)
        table |= {"model": {"name": options.model, "input": list(shape), **model_options}}
        table |= {"method": {"name": options.method, **{k: v for k, v in settings.items() if k not in model_options}}}
        place = None
        models.validate(options.model, shape, model_options)
    else:
        place, shape = options.task, _task_shape(options)
        source = read_source(*split_place(options.task))
        table |= {"task": {"name": "task", "file": options.task, "sha256": source.sha256}}
        table |= {"method": {"name": options.method, **settings}}
    if options.slices:
        table |= {"slices": options.slices.split(",")}
    run = parse_table(RunFile, table, source="the options")
    rules = methods.plan_rules(run.method.name, run.method.parameters)
    return Subject(run=run, rules=rules, input_shape=tuple(shape), architectures=methods.architectures(run), task=place)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError(f"--set: expected KEY=VALUE, got {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value  # a text, as nobody types quotes


def _task_shape(options: argparse.Namespace) -> tuple[int, ...]:
    shape = typed_shape(options.input)
    if shape is None:
        task_input = read_source(*split_place(options.task)).load().input
        shape = tuple(task_input) if task_input is not None else None
    if shape is None:
        raise InputError("--input: the task does not tell the shape of a sample; type it, such as --input 3x96x96")
    return shape


def parse_size(option: str, text: str) -> int:
    """A size that a person typed, above zero."""
    try:
        count = parse_bytes(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
    if count <= 0:
        raise InputError(f"{option}: expected more than 0 bytes, got {text!r}")
    return count


def find_plan(options: argparse.Namespace) -> tuple[Subject, Choice]:
    """The plan for what was typed; raises `NothingFitsError` with the smallest budget that would do."""
    subject = read_subject(options)
    budget, training = None, None
    if options.budget is not None:
        budget = parse_size("--budget", options.budget)
    elif options.training_budget is not None:
        training = parse_size("--training-budget", options.training_budget)
    elif options.profile is not None:
        budget = report.report_known_model(options.profile, None).budget_bytes
    else:
        budget = report.report_system(Path("/"), None).budget_bytes
    search, room = subject.search_for(budget, training)
    return subject, search.choose(search.rows.worker_bytes, room, of_training=training is not None)


def to_json(choice: Choice) -> dict[str, Any]:
    """The plan as the command prints it."""
    plan = choice.plan
    return {
        **_way(choice.chosen),
        "channels_last": plan.channels_last,
        "dtype": plan.dtype,
        "predicted_total_bytes": plan.predicted_bytes,
        "budget_bytes": plan.budget_bytes,
        "base_bytes": plan.predicted_bytes - plan.training_bytes,
        "fits": True,
        "alternatives": [_way(candidate) for candidate in choice.alternatives],
        "reason": choice.reason,
    }


def _way(candidate: Candidate) -> dict[str, Any]:
    shape = candidate.shape
    return {
        "slice": candidate.slice,
        "groups": [list(group) for group in shape.groups],
        "skipped": list(shape.skipped),
        "microbatch": shape.microbatch,
        "recompute": shape.recompute,
        "buffered": shape.buffered,
        "num_models": shape.num_models,
        "predicted_training_bytes": candidate.training_bytes,
        "relative_time": candidate.relative_time,
        "estimated_seconds_per_sample": round(candidate.sample_s, 6),
    }


def describe(subject: Subject, choice: Choice) -> str:
    """The plan in lines for people."""
    lines = [
        f"{subject.run.what}, batch {subject.run.train.batch}, {subject.run.method.name}: {choice.plan.describe()}"
    ]
    lines += [f"  {name:<10} {text}" for name, text in _facts(choice)]
    if choice.alternatives:
        lines.append("  otherwise")
        lines += [f"             {_short(candidate)}" for candidate in choice.alternatives]
    return "\n".join(lines)


def _facts(choice: Choice) -> Iterator[tuple[str, str]]:
    plan = choice.plan
    for number, group in enumerate(plan.groups, start=1):
        yield f"group {number}", _names(group)
    if plan.skipped:
        yield "untrained", _names(plan.skipped)
    training, total, budget = map(format_bytes, (plan.training_bytes, plan.predicted_bytes, plan.budget_bytes))
    yield "memory", f"training adds {training} at most, {total} with the process; budget {budget}"
    seconds = f"{_SAMPLES * choice.chosen.sample_s:.2g} s for an epoch of {_SAMPLES:,} samples"
    estimate = f"; about {seconds}, estimated from single steps on this device" if choice.chosen.sample_s else ""
    yield "time", f"{choice.chosen.relative_time:.2f} of training everything at once{estimate}"
    yield "because", choice.reason


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"


def _short(candidate: Candidate) -> str:
    shape = candidate.shape
    parts = [candidate.slice if not shape.groups else f"{len(shape.groups)} groups"]
    parts += [f"skips {len(shape.skipped)}"] if shape.skipped else []
    parts += [f"microbatch {shape.microbatch}"]
    parts += [f"recompute {shape.recompute}"] if shape.recompute else []
    costs = f"{format_bytes(candidate.training_bytes)}, {candidate.relative_time:.2f} of the time"
    return f"{', '.join(parts)}: {costs}"
