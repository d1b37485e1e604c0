"""Measures what each unit of a model costs, in a process of its own, and keeps the rows in a cache.

Covers: the subject of a measurement, the key under which its rows are kept, the cache, the worker that makes room for
it. Does not cover: the measurement itself (`unit_costs`), what follows from rows (`planning.cost`). The numbers are
those of this machine's kind and torch; another machine's rows are a good guess.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_client import durable
from edge_client.config.run_file import RunFile, TrainSection
from edge_client.config.task_files import split_place
from edge_client.device import guard
from edge_client.device.probe import find_torch
from edge_client.errors import FedfitError, MachineError
from edge_client.measuring import subprocess_call
from edge_client.methods import registry, user_methods
from edge_client.models import library
from edge_client.planning.rows import FORMAT, ModelRows, load_rows, save_rows
from edge_client.records import Count, Hash, PlanRules, from_map, to_map

__all__ = ["CalibrationJob", "become", "calibrated", "job_for", "main", "measure", "measure_beside"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationJob:
    """What to measure; everything that changes the numbers is in the key."""

    run: RunFile  # its model or task, classes, method and threads count
    input_shape: tuple[int, ...]
    slice: str = "full"
    task: str | None = None  # the task's file and object, FILE:OBJECT
    dtype: str = "fp32"
    limit_bytes: Count = 0  # that the process may grow by; 0: no limit
    key: Hash = "0" * 64


def job_for(
    run: RunFile,
    rules: PlanRules,
    input_shape: Sequence[int],
    *,
    task: str | None = None,
    slice_name: str = "full",
    dtype: str = "fp32",
) -> CalibrationJob:
    """A job and its key: equal keys have equal rows. Batch and optimizer are not in them: what they add is known."""
    torch, section = find_torch(), run.section(slice_name)
    identity = {
        "format": FORMAT,
        "model": to_map(replace(section, init="random", init_sha256="")) if section is not None else None,
        "task": [run.task.sha256, split_place(task, is_blob=True)[1]] if run.task is not None and task else None,
        "input": list(input_shape),
        "slice": slice_name,
        "classes": len(run.classes),
        "method": registry.trains_as(run.method.name),
        "rules": [rules.groups, rules.auxiliary, rules.weight_copies, rules.step_copies],  # what parameters change
        "dtype": dtype,
        "threads": run.train.threads,
        **({"library": library.version(section.name)} if section is not None and ":" in section.name else {}),
        "torch": torch.version if torch is not None else "",
        "machine": platform.machine(),
    }
    if run.train.normalise:
        identity["normalise"] = True
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    # a warm-up with adam loads what any optimizer needs
    section_of_job = TrainSection(optimizer="adam", threads=run.train.threads, normalise=run.train.normalise)
    run = replace(run, train=section_of_job)
    return CalibrationJob(run=run, input_shape=tuple(input_shape), slice=slice_name, task=task, dtype=dtype, key=key)


def calibrated(job: CalibrationJob, cache: Path | None) -> ModelRows:
    """The rows of a job: from the cache, or measured in a process of its own and kept there.

    Raises `MachineError`, or `InputError` for a task's model that does not train.
    """
    path = cache / f"{job.key}.json" if cache is not None else None
    cached = load_rows(path, key=job.key) if path is not None else None
    if cached is not None and cached.private_base_bytes:  # older versions did not measure it
        return cached
    try:
        result = subprocess_call.call(
            "edge_client.measuring.calibration", job, threads=job.run.train.threads, what="the calibration"
        )
    except MemoryError as error:
        raise MachineError(f"the calibration needs more memory than there is: {error}") from error
    rows = from_map(ModelRows, result, where="result of the calibration")
    if path is not None:
        try:
            save_rows(path, rows)
        except OSError as error:
            _log.warning("cannot keep cost rows in %s: %s", path, error.strerror)
    return rows


def become(job: CalibrationJob, workdir: Path) -> None:
    """Replace this worker by a calibration that becomes the worker again: two of them would not fit side by side."""
    guard.lift_limit()
    (workdir / "calibration.json").write_text(json.dumps(to_map(job)), encoding="utf-8")
    os.execv(sys.executable, [sys.executable, "-m", "edge_client.measuring.calibration", "--for", str(workdir)])


def measure_beside(job: CalibrationJob, workdir: Path) -> None:
    """For a process that has memory for both: measure in another one; a failure is logged, and not repeated."""
    guard.lift_limit()
    (workdir / "calibration.json").write_text(json.dumps(to_map(job)), encoding="utf-8")
    try:
        calibrated(replace(job, limit_bytes=0), durable.cache_dir())
    except FedfitError as error:
        _log.warning("%s", error)


def _for_worker(workdir: Path) -> None:
    """Measure, keep the rows where the worker looks first, and become the worker."""
    job = from_map(CalibrationJob, json.loads((workdir / "calibration.json").read_bytes()), where="calibration job")
    try:
        save_rows(durable.cache_dir() / f"{job.key}.json", measure(job))
    except (FedfitError, OSError, MemoryError, RuntimeError) as error:  # the worker does without
        _log.warning("the calibration failed: %s", error)
    guard.lift_limit()
    os.execv(sys.executable, [sys.executable, "-m", "edge_client.worker.process", str(workdir)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[0] == "--for":
        subprocess_call.stand_guard()
        _for_worker(Path(arguments[1]))
    return subprocess_call.serve(CalibrationJob, measure, arguments)


def measure(job: CalibrationJob) -> ModelRows:
    """The rows, measured in this process; malloc must be pinned before torch is loaded."""
    from edge_client.measuring import prepared_training, unit_costs  # torch

    prepared = prepared_training.prepare(job.run, job.input_shape, task=job.task, slice_name=job.slice, dtype=job.dtype)
    method_code = user_methods.guard(job.run.method.name, "training on a few samples")
    with method_code, prepared.recipe.user_code("training it on a few samples"):
        return unit_costs.measure(prepared, key=job.key, limit_bytes=job.limit_bytes)


if __name__ == "__main__":
    sys.exit(main())
