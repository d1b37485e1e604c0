"""What people ask of runs, and the answers: start (also dry), stop, where a model lies."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.control_messages import (
    FindModel,
    Request,
    StartedRun,
    StartRun,
    StoppedRun,
    StopRun,
    StoredModel,
)
from coordinator.requests.run_overview import waits_for
from coordinator.requests.views import find_run
from coordinator.results import environment
from coordinator.run_check import check_run
from coordinator.store.rows import ModelRow, RunRow
from edge_client.config.run_file import RunFile
from edge_client.config.task_files import MAX_TASK_BYTES
from edge_client.errors import ConflictError, InputError
from edge_client.records import from_map, to_map

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = ["RunCommands", "judged", "version_of"]

_DRY = "dry"


def version_of(run: RunRow, version: str) -> str:
    """The version that is meant; raises `InputError` for a text that names no version of any run."""
    if not version:
        return "best" if run.best_version is not None else "last"
    if version not in ("best", "last") and not (version.isascii() and version.isdigit()):
        raise InputError(f"--version: expected a number, best or last, got {version!r}")
    return version


def judged(run: RunRow, model: ModelRow) -> dict[str, Any]:
    """How a version was judged, as the fields of `StoredModel`."""
    metric = str(run.file.get("stop", {}).get("metric", "accuracy"))
    return {
        "metric": metric if model.score is not None else "",
        "score": model.score,
        "is_best": model.version == run.best_version,
    }


class RunCommands:
    """Requests about runs to a running coordinator."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def answers(self) -> Mapping[type[Request[Any]], Callable[[Any], object]]:
        """What answers each request."""
        return {
            StartRun: self.start,
            StopRun: self._stop,
            FindModel: self._find_model,
        }

    def find(self, name: str) -> RunRow:
        """The run that a person names: id, unique prefix or latest; raises `NoSuchNameError`."""
        return find_run(self._service.store, name)

    def start(self, request: StartRun) -> StartedRun:
        """Start a run, or queue it; the store keeps the text of its task's file, from which the task is loaded."""
        file = request.file
        check_run(file)
        conductor, store = self._service.conductor, self._service.store
        if file.init.startswith("run:"):
            conductor.model_named(file.init.removeprefix("run:"))
        _check_test_data(file, self._service.test_data)
        if request.dry:
            self._make_room(file.name)
        source = request.task_source.encode()
        name = f"{file.name}-{_DRY}" if request.dry else file.name
        row = RunRow(
            id=f"{name}-{store.runs.next_number(name)}",
            file=to_map(file),
            task_sha256=_task_hash(file, source),
            dry=request.dry,
            environment=environment.describe(),
            created_s=int(time.time()),
        )
        if row.task_sha256:
            self._service.blobs.write(source, row.task_sha256, point="task")
        store.runs.add(row)
        return StartedRun(run=row.id, waits_for=waits_for(store, row.id))

    def _make_room(self, name: str) -> None:
        """A dry run asks the devices, so none may train; the answers of older ones are of no use any more."""
        runs = self._service.store.runs
        for run in runs.all():
            if run.state in ("queued", "running"):
                raise ConflictError(
                    f"run {run.id!r} is {run.state}, and a dry run needs the devices; "
                    f"wait for it, or end it: coordinator run stop {run.id}"
                )
        for run in [run for run in runs.all() if run.dry and from_map(RunFile, run.file).name == name]:
            self._service.conductor.forget(run)

    def _stop(self, request: StopRun) -> StoppedRun:
        row = self.find(request.run)
        if row.state in ("queued", "running"):
            self._service.conductor.stop(row.id, at_once=request.now)
        return StoppedRun(run=row.id, state=row.state)

    def _find_model(self, request: FindModel) -> StoredModel:
        row = self.find(request.run)
        model = self._service.conductor.model_named(f"{row.id}@{version_of(row, request.version)}", option="--version")
        blobs = self._service.blobs
        return StoredModel(
            run=row.id,
            file=from_map(RunFile, row.file),
            task=str(blobs.path(row.task_sha256)) if row.task_sha256 else None,
            version=model.version,
            sha256=model.sha256,
            path=str(blobs.path(model.sha256)),
            **judged(row, model),
        )


def _check_test_data(file: RunFile, simulated: str) -> None:
    """Raise `InputError` if the server lacks its test data, before any device works."""
    if file.evaluate.on == "simulate" and not simulated:
        raise InputError('evaluate.on = "simulate" is for `coordinator simulate`; say devices, or npz:PATH')
    path = Path(simulated if file.evaluate.on == "simulate" else file.evaluate.on.removeprefix("npz:"))
    if file.evaluate.on != "devices" and not path.is_file():
        raise InputError(f"evaluate.on: expected an npz file on the server, {path} is none")


def _task_hash(file: RunFile, source: bytes) -> str:
    """The hash of the task's source, which the run file must name; empty for a built-in model."""
    if file.task is None:
        return ""
    sha256 = hashlib.sha256(source).hexdigest()
    if not 0 < len(source) <= MAX_TASK_BYTES:
        raise InputError(f"task {file.task.name!r}: expected a file of 1 to {MAX_TASK_BYTES} bytes, got {len(source)}")
    if file.task.sha256 != sha256:
        raise InputError(
            f"task {file.task.name!r}: the run file says sha256 {file.task.sha256 or 'nothing'!r}, "
            f"the file has {sha256}"
        )
    return sha256
