"""How a frozen set becomes the next version: folded, its devices compared, committed, announced.

Covers: the jobs and rows of a version. Does not cover: when a set is frozen (`rounds`), summing up (`aggregation`),
what is sent of the version (`model_parts`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from functools import partial

from coordinator.aggregation.jobs import FoldedModel, FoldJob, NormaliseJob, StudyJob, StudyTimes, UpdateRef
from coordinator.conductor.active_run import ActiveRun
from coordinator.conductor.comparisons import Comparisons
from coordinator.conductor.model_files import ModelFiles
from coordinator.conductor.retention import Retention
from coordinator.conductor.run_jobs import RunJobs
from coordinator.rounds.events import Event, Folded
from coordinator.rounds.frozen_set import capped, counted_samples
from coordinator.rounds.instructions import Announce, Commit, Fold
from coordinator.store.base import Store
from coordinator.store.rows import LeftOutRow, ModelRow
from edge_client import faults
from edge_client.data.input_sums import SUMS_ROUND
from edge_client.logs import about
from edge_client.transport.blobs import BlobStore

__all__ = ["ANNOUNCEMENT", "Commits"]

log = logging.getLogger(__name__)

ANNOUNCEMENT = "announcement"  # the setting that keeps the newest one


class Commits:
    """The versions of the active run."""

    def __init__(
        self,
        *,
        store: Store,
        blobs: BlobStore,
        jobs: RunJobs,
        models: ModelFiles,
        comparisons: Comparisons,
        retention: Retention,
        announce: Callable[[str], None],
        save_traffic: Callable[[], None],
        handle: Callable[[Event, float], None],
    ) -> None:
        """`announce` sends a message to all devices, `save_traffic` writes down what travelled for the run, and
        `handle` passes an event to the machine of the active run.
        """
        self._store = store
        self._blobs = blobs
        self._jobs = jobs
        self._models = models
        self._comparisons = comparisons
        self._retention = retention
        self._announce = announce
        self._save_traffic = save_traffic
        self._handle = handle

    def fold(self, run: ActiveRun, fold: Fold) -> None:
        """Have the next version made; the machine gets `Folded` when its files are there and were compared."""
        version = fold.round.number
        out = self._blobs.temporary_path(f"fold-{run.id}")

        def compare(model: ModelRow) -> None:
            if fold.round.number == SUMS_ROUND:
                self._handle(Folded(model), time.monotonic())
                return
            self._comparisons.compare(run, fold, model, then=lambda: self._handle(Folded(model), time.monotonic()))

        def folded(answer: FoldedModel) -> None:
            number = fold.round.number
            run.left_out = [
                LeftOutRow(run=run.id, round=number, device=left.device, code=left.code, detail=left.detail)
                for left in answer.left_out
            ]
            if answer.study is not None:
                _log_study(run.id, number, answer.study)
            self._models.add(run.row, run.file, answer, out, version=version, set_hash=fold.set_hash, then=compare)

        is_of_sums = fold.round.number == SUMS_ROUND
        job = self._normalise_job(run, fold, str(out)) if is_of_sums else self._fold_job(run, fold, str(out))
        self._jobs.submit_for(run.id, job, folded)

    def _normalise_job(self, run: ActiveRun, fold: Fold, out: str) -> NormaliseJob:
        """One device counts for no more than in training, however many samples it claims."""
        reports = [update.report for update in fold.updates if update.report.input_sums is not None]
        counted = capped([report.num_held for report in reports], run.file.devices.max_weight_ratio)
        return NormaliseJob(
            model=str(self._blobs.path(run.model.sha256)),
            sums=tuple(report.input_sums for report in reports if report.input_sums is not None),
            weights=tuple(num / report.num_held for num, report in zip(counted, reports, strict=True)),
            out=out,
        )

    def _fold_job(self, run: ActiveRun, fold: Fold, out: str) -> FoldJob:
        weights = counted_samples(fold.updates, run.file.devices.max_weight_ratio)
        updates = [
            UpdateRef(
                device=update.device,
                path=str(self._blobs.path(update.sha256)),
                num_samples=weight,
                slice=run.slice_name(update.lease),
            )
            for update, weight in zip(fold.updates, weights, strict=True)
        ]
        return FoldJob(
            run=run.file,
            task=self._models.task_path(run.row),
            round=fold.round.number,
            model=str(self._blobs.path(run.model.sha256)),
            base=str(self._blobs.path(run.model.sent_sha256)),
            updates=tuple(updates),
            num_devices=max(fold.round.num_available, len(self._store.runs.device_info(run.id))),
            out=out,
        )

    def commit(self, run: ActiveRun, commit: Commit) -> None:
        """Write the version and the end of its round; from now on it is the one that travels."""
        round_, model = commit.round, commit.model
        run.clock.note("fold")
        self._log_left_out(run)
        self._store.rounds.commit(round_.number, round_.attempt, model, run.left_out)
        run.clock.note("commit")
        replaced, run.model = run.model, model
        run.parts = {}
        if round_.number == SUMS_ROUND:
            self._retention.drop_version(replaced)

    def study(self, run: ActiveRun) -> None:
        """Let the aggregator make of the newest version what takes long while devices train."""
        if run.knowledge is not None and run.knowledge.studies:
            path = str(self._blobs.path(run.model.sha256))
            job = StudyJob(run=run.file, model=path, version=run.model.version)
            self._jobs.submit(job, lambda answer: None)

    def announce(self, run: ActiveRun, announce: Announce) -> None:
        """Tell all devices that a round has ended, and delete what it does not need any more."""
        round_, version = announce.round, announce.version
        if not run.row.dry:
            news = {"run": run.id, "round": round_.number, "version": version, "sha256": run.model.sha256}
            self._store.settings.set(ANNOUNCEMENT, json.dumps(news))  # a start after a kill says it again
            self._announce(json.dumps(news))
        self._store.after_commit(partial(faults.point, "coordinator.announced"))
        self._retention.round_announced(round_, version)
        self._save_traffic()
        self._store.rounds.announce(run.id, round_.number, round_.attempt, run.clock.end())

    def _log_left_out(self, run: ActiveRun) -> None:
        """Log the knowledge that could not be used; what is the same in every round is logged once."""
        known = {(row.device, row.code): row.detail for row in self._store.rounds.left_out(run.id)}
        for row in run.left_out:
            if known.get((row.device, row.code)) != row.detail:
                whose = about(device=row.device or None, run=row.run, round=row.round)
                log.warning("%s: %s: %s", row.device or "all devices", row.code, row.detail, extra=whose)


def _log_study(run_id: str, number: int, study: StudyTimes) -> None:
    took = (study.ended_s - study.began_s, study.began_s, study.waited_s)
    what = "run %s round %d: a study beside it took %.3f s from %.3f on, its fold waited %.3f s for that"
    log.info(what, run_id, number, *took, extra=about(run=run_id, round=number))
