"""The parts in which the newest version travels: a slice of the model, and the knowledge for its device.

Covers: which parts a lease needs, which of them exist, having the others made.
Does not cover: who waits for a part (`assignments`), who trains which slice (`rounds.slice_choice`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from coordinator.aggregation.jobs import EncodeJob, Failure, TellJob, WrittenFile
from coordinator.conductor.active_run import ActiveRun
from coordinator.conductor.model_files import ModelFiles
from coordinator.conductor.retention import Retention
from coordinator.conductor.run_jobs import RunJobs
from coordinator.store.base import Store
from coordinator.store.rows import LeaseRow, PartRow
from edge_client.knowledge.schema import KNOWLEDGE_PART, PUBLIC_PART
from edge_client.methods.slices import WHOLE_MODEL
from edge_client.records import PartRef
from edge_client.transport.blobs import BlobStore

__all__ = ["ModelParts"]


class ModelParts:
    """The parts of the active run's newest version. For a plan or for sums, devices get the settings alone."""

    def __init__(
        self, *, store: Store, blobs: BlobStore, jobs: RunJobs, models: ModelFiles, retention: Retention
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._jobs = jobs
        self._models = models
        self._retention = retention

    def missing(self, run: ActiveRun, lease: LeaseRow) -> list[str]:
        """The parts that a lease needs and that must be made first."""
        return [] if _needs_no_model(run, lease) else [name for name in _names(run, lease) if name not in run.parts]

    def refs(self, run: ActiveRun, lease: LeaseRow) -> tuple[PartRef, ...]:
        """What the device of a lease may fetch; none of it is missing."""
        settings = PartRef(key="run", sha256=run.row.settings_sha256, length=run.row.settings_length)
        if _needs_no_model(run, lease):
            return (settings,)
        knowledge = [(name, run.parts[name]) for name in _names(run, lease) if name != lease.slice]
        refs = (PartRef(key=name, sha256=part.sha256, length=part.length) for name, part in knowledge)
        return (settings, self.model_ref(run, lease), *refs)

    def model_ref(self, run: ActiveRun, lease: LeaseRow) -> PartRef:
        """The model as the device of a lease gets it; the whole for one that needs no model."""
        key = "model" if lease.slice == WHOLE_MODEL else f"slice:{lease.slice}"
        if _needs_no_model(run, lease) or not run.in_parts:
            return PartRef(key=key, sha256=run.model.sent_sha256, length=run.model.sent_length)
        part = run.parts[lease.slice]
        return PartRef(key=key, sha256=part.sha256, length=part.length)

    def make(self, run: ActiveRun, name: str, lease: LeaseRow, then: Callable[[bool], None]) -> None:
        """Have a part made; `then` gets whether it can be sent: it cannot if a newer version came meanwhile."""
        model = run.model
        out = self._blobs.temporary_path(f"part-{hashlib.sha256(name.encode()).hexdigest()[:16]}")

        def add(answer: WrittenFile | Failure) -> None:
            if run.model != model:
                then(False)
            elif isinstance(answer, Failure):
                self._jobs.failed(run.id, answer)
            else:
                part = PartRow(
                    run=run.id, version=model.version, slice=name, sha256=answer.sha256, length=answer.length
                )
                self._blobs.adopt(out, part.sha256, point="part")
                for old in self._store.models.add_part(part):
                    self._retention.drop(old.sha256)
                run.parts[name] = part
                then(True)

        job: EncodeJob | TellJob
        if name == lease.slice:
            job = self._models.encode_job(run.row, run.file, model.sha256, name, out)
        else:
            job = TellJob(
                run=run.file,
                model=str(self._blobs.path(model.sha256)),
                slice=lease.slice,
                device=lease.device,
                public=name == PUBLIC_PART,
                round=lease.round,
                out=str(out),
            )
        self._jobs.submit(job, add)


def _needs_no_model(run: ActiveRun, lease: LeaseRow) -> bool:
    return run.row.dry or lease.needs_no_model


def _names(run: ActiveRun, lease: LeaseRow) -> list[str]:
    """What is made of the newest version for a lease: a slice of its model, and the knowledge for its device."""
    rules = run.knowledge
    if rules is None:
        return [lease.slice] if run.in_parts else []
    knowledge = f"{KNOWLEDGE_PART}{lease.slice}"
    if rules.per_device:
        knowledge += f"@{lease.device}"
    return [lease.slice, knowledge, *([PUBLIC_PART] if rules.public else [])]
