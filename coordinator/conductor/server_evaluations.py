"""Judging versions: on the test data of the server, and the scores that result from any evaluation.

Covers: which file the server's test data is, the rows of evaluations and scores.
Does not cover: when a version is judged and what its score is (`rounds`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from coordinator.aggregation.jobs import EvaluateJob, ServerEvaluation
from coordinator.conductor.active_run import ActiveRun
from coordinator.conductor.model_files import ModelFiles
from coordinator.conductor.retention import Retention
from coordinator.conductor.run_jobs import RunJobs
from coordinator.rounds import evaluation
from coordinator.rounds.events import Event, Judged
from coordinator.rounds.instructions import SaveScore
from coordinator.store.base import Store
from coordinator.store.rows import SERVER, EvaluationRow
from edge_client.config.run_file import RunFile
from edge_client.logs import about
from edge_client.transport.blobs import BlobStore

__all__ = ["ServerEvaluations", "server_data_path"]

log = logging.getLogger(__name__)


def server_data_path(file: RunFile, simulated: str) -> str:
    """The path of the server's test data; `simulated` is that of a simulation, also where devices judge. Or empty."""
    where = file.evaluate.on
    return where.removeprefix("npz:") if where.startswith("npz:") else simulated


class ServerEvaluations:
    """Judges the versions of the active run on the server."""

    def __init__(
        self,
        *,
        store: Store,
        blobs: BlobStore,
        jobs: RunJobs,
        models: ModelFiles,
        retention: Retention,
        handle: Callable[[Event, float], None],
        simulated_data: str = "",
    ) -> None:
        """`handle` passes an event to the machine of the active run; `simulated_data` is a simulation's test set."""
        self._store = store
        self._blobs = blobs
        self._jobs = jobs
        self._models = models
        self._retention = retention
        self._handle = handle
        self._simulated_data = simulated_data

    def judge(self, run: ActiveRun, version: int) -> None:
        """Evaluate the newest version on the server's test data: the machine gets `Judged` when the rows are stored."""
        job = EvaluateJob(
            run=run.file,
            task=self._models.task_path(run.row),
            model=str(self._blobs.path(run.model.sha256)),
            data=server_data_path(run.file, self._simulated_data),
        )
        self._jobs.submit_for(run.id, job, lambda answer: self._judged(run, version, answer))

    def _judged(self, run: ActiveRun, version: int, answer: ServerEvaluation) -> None:
        rows = [
            EvaluationRow(
                run=run.id,
                version=version,
                device=SERVER,
                num_samples=result.num_samples,
                num_correct=result.num_correct,
                loss_sum=result.loss_sum,
                slice=result.slice,
                confusion=result.confusion,
            )
            for result in answer.results
        ]
        self._log_untested(rows)
        for row in rows:
            self._store.evaluations.save(row)
        self._handle(Judged(rows), time.monotonic())

    def _log_untested(self, rows: Sequence[EvaluationRow]) -> None:
        """Log once that the server's test data has no samples: it is the same for every version."""
        problem = evaluation.untested(rows)
        if problem is not None and not self._store.evaluations.versions(problem.run):
            log.warning("%s: %s", problem.code, problem.detail, extra=about(run=problem.run, round=problem.round))

    def save_score(self, run: ActiveRun, saved: SaveScore) -> None:
        """Write a version's score; a version that is not the best one any more may have been kept only for that."""
        before = self._store.runs.get(run.id)
        self._store.models.save_score(run.id, saved.version, saved.score, saved.best_version)
        beaten = before.best_version if before is not None else None
        model = self._store.models.get(run.id, beaten) if beaten not in (None, saved.best_version) else None
        if model is not None:
            self._retention.drop_version(model)
