"""Comparing the models that the devices of a round sent, while their updates are there, for the run's report.

Covers: the job and what is kept of its answer. Does not cover: which rounds are compared (`results.similarity_record`),
comparing (`aggregation.comparison`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from coordinator.aggregation.jobs import Failure, ProbedUpdate, ProbeJob
from coordinator.conductor.active_run import ActiveRun
from coordinator.conductor.model_files import ModelFiles
from coordinator.conductor.run_jobs import RunJobs
from coordinator.conductor.server_evaluations import server_data_path
from coordinator.results import similarity_record
from coordinator.results.similarity_record import Compared, Findings
from coordinator.rounds.instructions import Fold
from coordinator.store.base import Store
from coordinator.store.rows import ModelRow
from edge_client.logs import about
from edge_client.methods import registry as methods
from edge_client.transport.blobs import BlobStore

__all__ = ["Comparisons"]

log = logging.getLogger(__name__)


class Comparisons:
    """The comparisons of the active run; whatever comes of one, the round goes on."""

    def __init__(
        self,
        *,
        store: Store,
        blobs: BlobStore,
        jobs: RunJobs,
        models: ModelFiles,
        simulated: bool = False,
        simulated_data: str = "",
        device_folders: Path | None = None,
    ) -> None:
        """Of a simulation: the npz file of its test set, and the folder that has one for each of its devices."""
        self._store = store
        self._blobs = blobs
        self._jobs = jobs
        self._models = models
        self._simulated = simulated
        self._simulated_data = simulated_data
        self._device_folders = device_folders

    def compare(self, run: ActiveRun, fold: Fold, model: ModelRow, *, then: Callable[[], None]) -> None:
        """Compare the updates of a fold if that is due, then call `then`. A restart folds and compares again."""
        job = self._probe_job(run, fold, model)
        if job is None:
            then()
            return

        def save(answer: Findings | Failure) -> None:
            number, key = fold.round.number, similarity_record.setting_of(run.id)
            record = similarity_record.parse(self._store.settings.get(key))
            if isinstance(answer, Failure):
                what = "the devices' models could not be compared: %s: %s"
                log.warning(what, answer.code, answer.detail, extra=about(run=run.id, round=number))
                record = similarity_record.failed(record, number, answer.detail)
            else:
                record = similarity_record.added(record, answer)
            self._store.settings.set(key, similarity_record.text_of(record))
            then()

        self._jobs.submit(job, save)

    def _probe_job(self, run: ActiveRun, fold: Fold, model: ModelRow) -> ProbeJob | None:
        """None if the comparison is switched off, is not due, or has no test data."""
        file, data = run.file, server_data_path(run.file, self._simulated_data)
        never = similarity_record.why_never(file, simulated=self._simulated)
        if never or not data or not similarity_record.is_due(file, fold.round.number):
            return None
        keeps_tensors = not methods.has_global_model(file.method.name, file.method.parameters)
        blobs = {update.device: update.sha256 for update in fold.updates}
        devices = [Compared(device=update.device, slice=run.slice_name(update.lease)) for update in fold.updates]
        probed = [
            ProbedUpdate(
                device=device.device,
                path=str(self._blobs.path(blobs[device.device])),
                slice=device.slice,
                method_state=self._method_state(run.id, device.device) if keeps_tensors else None,
            )
            for device in similarity_record.architectures_first(devices)
        ]
        return ProbeJob(
            run=file,
            task=self._models.task_path(run.row),
            round=fold.round.number,
            model=str(self._blobs.path(model.sha256)),
            base=str(self._blobs.path(run.model.sha256)),
            updates=tuple(probed),
            data=data,
        )

    def _method_state(self, run_id: str, device: str) -> str | None:
        """The folder in which a virtual device keeps the tensors that its method never sends."""
        return str(self._device_folders / device / "method-state" / run_id) if self._device_folders else None
