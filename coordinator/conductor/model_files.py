"""The files of a version: how one that the aggregator wrote becomes blobs and a row, and how people name one.

Covers: the model itself and the encoded form that travels. Does not cover: slices of it (`model_parts`), how long
the blobs stay (`retention`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from coordinator.aggregation.jobs import EncodeJob, WrittenFile
from coordinator.conductor.active_run import travels_in_parts
from coordinator.conductor.run_jobs import RunJobs
from coordinator.state import RETAINED_MODELS
from coordinator.store.base import Store
from coordinator.store.rows import ModelRow, RunRow
from edge_client.config.run_file import RunFile
from edge_client.errors import InputError
from edge_client.transport.blobs import BlobStore

__all__ = ["ModelFiles"]


class ModelFiles:
    """The versions of all runs as files."""

    def __init__(self, *, store: Store, blobs: BlobStore, jobs: RunJobs) -> None:
        self._store = store
        self._blobs = blobs
        self._jobs = jobs

    def add(
        self,
        run: RunRow,
        file: RunFile,
        written: WrittenFile,
        out: Path,
        *,
        version: int,
        set_hash: str = "",
        then: Callable[[ModelRow], None],
    ) -> None:
        """Make a model at `out` a blob, have the form made in which it travels, and pass on the row of the version."""
        self._blobs.adopt(out, written.sha256, point="model")
        row = ModelRow(
            run=run.id,
            version=version,
            sha256=written.sha256,
            length=written.length,
            sent_sha256=written.sha256,
            sent_length=written.length,
            set_hash=set_hash,
        )
        if file.rounds.codec == "fp32" or travels_in_parts(file):
            then(row)
            return
        encoded = self._blobs.temporary_path(f"sent-{run.id}")

        def add_encoded(sent: WrittenFile) -> None:
            self._blobs.adopt(encoded, sent.sha256, point="sent")
            then(dataclasses.replace(row, sent_sha256=sent.sha256, sent_length=sent.length))

        self._jobs.submit_for(run.id, self.encode_job(run, file, row.sha256, "full", encoded), add_encoded)

    def encode_job(self, run: RunRow, file: RunFile, sha256: str, slice_name: str, out: Path) -> EncodeJob:
        """The job that makes the form in which a slice of a model travels."""
        model = str(self._blobs.path(sha256))
        return EncodeJob(run=file, task=self.task_path(run), model=model, slice=slice_name, out=str(out))

    def task_path(self, run: RunRow) -> str | None:
        """The source of the run's task; None for a built-in model."""
        return str(self._blobs.path(run.task_sha256)) if run.task_sha256 else None

    def named(self, name: str, *, option: str = "init") -> ModelRow:
        """A version by `RUN`, `RUN@last`, `RUN@best` or `RUN@VERSION`; raises `InputError` that names the option."""
        run_id, _, which = name.partition("@")
        run = self._store.runs.get(run_id)
        if run is None:
            raise InputError(f"{option}: expected a run of this coordinator, got {run_id!r}; see: coordinator run list")
        version = run.best_version if which == "best" else int(which) if which.isdigit() else None
        if which == "best" and version is None:
            instead = f"use run:{run_id}" if option == "init" else "use last"
            raise InputError(f"{option}: run {run_id!r} has no best version, nothing of it was judged; {instead}")
        model = self._store.models.last(run_id) if version is None else self._store.models.get(run_id, version)
        if model is None or not self._store.blob_references.is_needed(model.sha256, RETAINED_MODELS):
            what = "no model" if version is None else f"no version {version} any more"
            raise InputError(f"{option}: run {run_id!r} has {what}; the last {RETAINED_MODELS} and the best are kept")
        if not self._blobs.verified(model.sha256):
            raise InputError(
                f"{option}: version {model.version} of run {run_id!r} (blob {model.sha256[:12]}) is missing or damaged "
                "on disk; name another version, or restore a backup"
            )
        return model
