"""The life of a run outside its rounds: queued, its first model made, begun, recovered after a restart, ended.

    queued ──costs measured, first model made──> running ──> finished | stopped | failed

Covers: the queue, the first model, what is looked at after a restart, how a run ends.
Does not cover: rounds (`rounds`), what the active run needs while it runs (`conductor`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping

from coordinator.aggregation.jobs import CalibrateJob, Calibration, InitJob, WrittenFile
from coordinator.conductor.model_files import ModelFiles
from coordinator.conductor.retention import Retention
from coordinator.conductor.run_jobs import RunJobs
from coordinator.conductor.update_rows import has_update
from coordinator.store.base import Store
from coordinator.store.rows import ModelRow, RunRow
from edge_client.config.run_file import RunFile
from edge_client.errors import InputError, PayloadError
from edge_client.logs import about
from edge_client.planning.rows import ROWS_KEY, ModelRows
from edge_client.records import from_map, to_map
from edge_client.transport.blobs import BlobStore

__all__ = ["Lifecycle"]

log = logging.getLogger(__name__)


class Lifecycle:
    """Begins and ends runs; one at a time is prepared or active."""

    def __init__(
        self,
        *,
        store: Store,
        blobs: BlobStore,
        jobs: RunJobs,
        models: ModelFiles,
        retention: Retention,
        begin: Callable[[RunRow], None],
        ended: Callable[[], None],
    ) -> None:
        """`begin` makes a run the active one; `ended` is called when the run that was prepared or active is over."""
        self._store = store
        self._blobs = blobs
        self._jobs = jobs
        self._models = models
        self._retention = retention
        self._begin = begin
        self._ended = ended
        self._preparing = ""  # the run whose first model is being made

    # after a restart

    def recover(self) -> RunRow | None:
        """The run to go on with, if its blobs are whole; all blobs that nobody needs are deleted."""
        run = self._store.runs.oldest("running")
        if run is not None and not self._is_whole(run):
            run = None
        self._retention.clean_up(run)
        return run

    def _is_whole(self, run: RunRow) -> bool:
        """Look at every blob of the open round: a lost update is asked for again, a lost model ends the run.

        A lost part of the model is made again when the run is active.
        """
        model = self._store.models.last(run.id)
        assert model is not None
        for sha256 in filter(None, (run.settings_sha256, run.task_sha256, model.sha256, model.sent_sha256)):
            if not self._blobs.verified(sha256):
                what = f"blob {sha256[:12]} of version {model.version} is missing or damaged"
                self.fail(run.id, f"damaged: {what}; restore a backup of the state directory")
                return False
        for part in self._store.models.parts(run.id):
            if part.version == model.version and not self._blobs.verified(part.sha256):
                what = "%s of version %d is missing or damaged on disk: making it again"
                log.warning(what, part.slice, part.version, extra=about(run=run.id))
        self._drop_lost_updates(run.id)
        return True

    def _drop_lost_updates(self, run_id: str) -> None:
        last = self._store.rounds.last(run_id)
        if last is None or last.state not in ("RUNNING", "FROZEN"):
            return
        for update in self._store.updates.of_attempt(run_id, last.number, last.attempt):
            if not has_update(self._store, self._blobs, update):
                what = "the update of %s is missing or damaged on disk: asking for it again"
                log.warning(what, update.device, extra=about(device=update.device, run=run_id, round=last.number))
                self._store.updates.drop(update)

    # before the first round

    def prepare_next(self) -> None:
        """Take the next run from the queue, unless one is being prepared."""
        if self._preparing:
            return
        waiting = self._store.runs.oldest("queued")
        if waiting is not None:
            self._prepare(waiting)

    def _prepare(self, run: RunRow) -> None:
        """Have the costs of a run's model measured and its first model made; then the run begins."""
        self._preparing = run.id
        try:
            file = from_map(RunFile, run.file)
            start, start_run = self._start_of(file)
        except InputError as error:
            self.fail(run.id, f"input: {error}")
            return
        except PayloadError as error:  # of a version that knew other keys
            self.fail(run.id, str(error))
            return
        task, out = self._models.task_path(run), self._blobs.temporary_path(f"init-{run.id}")
        first_model = InitJob(run=file, task=task, start=start, start_run=start_run, out=str(out))

        def calibrated(costs: Calibration) -> None:
            def add_model(written: WrittenFile) -> None:
                self._models.add(
                    run, file, written, out, version=0, then=lambda model: self._start(run, model, costs.rows)
                )

            self._jobs.submit_for(run.id, first_model, add_model)

        self._jobs.submit_for(run.id, CalibrateJob(run=file, task=task), calibrated)

    def _start_of(self, file: RunFile) -> tuple[str | None, RunFile | None]:
        """The model that a run goes on from, and its run; raises `InputError` if it is not there any more."""
        if not file.init.startswith("run:"):
            return None, None
        model = self._models.named(file.init.removeprefix("run:"))
        other = self._store.runs.get(model.run)
        return str(self._blobs.path(model.sha256)), from_map(RunFile, other.file) if other is not None else None

    def _start(self, run: RunRow, model: ModelRow, costs: Mapping[str, ModelRows]) -> None:
        """`costs` travel with the run's file: devices of this machine's kind need not measure the model."""
        self._preparing = ""
        settings = json.dumps({**run.file, ROWS_KEY: to_map(costs)}, sort_keys=True).encode()
        sha256 = hashlib.sha256(settings).hexdigest()
        self._blobs.write(settings, sha256, point="settings")
        self._store.runs.start(model, sha256, len(settings))
        started = self._store.runs.get(run.id)
        assert started is not None
        log.info("run %s begins", run.id, extra=about(run=run.id))
        self._begin(started)

    # the end

    def cancel(self, run_id: str) -> None:
        """Stop a run that is not active: it waits in the queue, or its first model is being made."""
        self._store.runs.set_state(run_id, "stopped", "stopped before it began")
        if self._preparing == run_id:
            self._preparing = ""
            self._ended()

    def fail(self, run_id: str, reason: str) -> None:
        """End a run that cannot go on; its open round is abandoned with it."""
        log.error("run %s failed: %s", run_id, reason, extra=about(run=run_id))
        last = self._store.rounds.last(run_id)
        self._store.runs.fail(run_id, reason[:500])
        if last is not None:
            self._retention.drop_updates(last)
        self._preparing = ""
        self._ended()

    def finish(self, run_id: str, state: str, reason: str) -> None:
        """End a run whose rounds are over."""
        self._store.runs.set_state(run_id, state, reason)
        log.info("run %s: %s (%s)", run_id, state, reason, extra=about(run=run_id))
        self._ended()
