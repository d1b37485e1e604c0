"""Which blobs stay on the coordinator's disk, and deleting the others.

Kept are what the store needs (the last models and the best one of each run, settings, tasks, updates of an open
round), updates that are on their way or being checked, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

from coordinator.fleet.downloads import Downloads
from coordinator.fleet.uploads import Uploads
from coordinator.state import RETAINED_MODELS
from coordinator.store.base import Store
from coordinator.store.rows import ModelRow, RoundRow, RunRow
from edge_client.transport.blobs import BlobStore

__all__ = ["Retention"]


class Retention:
    """The blobs of all runs."""

    def __init__(self, *, store: Store, blobs: BlobStore, uploads: Uploads, downloads: Downloads) -> None:
        self._store = store
        self._blobs = blobs
        self._uploads = uploads
        self._downloads = downloads
        self._held: dict[str, str] = {}  # lease -> its update, while it is being checked
        self._num_holding: Counter[str] = Counter()  # update -> leases that hold it

    def hold(self, lease: str, sha256: str) -> None:
        """Keep the update of a lease until `release`: it is being checked, and no row names it yet."""
        self.release(lease)
        self._held[lease] = sha256
        self._num_holding[sha256] += 1

    def is_held(self, lease: str) -> bool:
        """Whether the update of a lease is being checked."""
        return lease in self._held

    def release(self, lease: str) -> None:
        """The update of a lease has been checked."""
        sha256 = self._held.pop(lease, None)
        if sha256 is None:
            return
        self._num_holding[sha256] -= 1
        if not self._num_holding[sha256]:
            del self._num_holding[sha256]

    def drop_held(self) -> None:
        """Nobody checks these updates any more."""
        held = dict(self._held)
        for lease in held:
            self.release(lease)
        self._drop_all(held.values())

    def drop(self, sha256: str) -> None:
        """Delete a blob unless it is needed: another device may have sent, or may be sending, the same bytes.

        The row that named it must be gone for good first, so it is looked at when everything so far is durable.
        """
        self._store.after_commit(partial(self._drop_now, sha256))

    def _drop_now(self, sha256: str) -> None:
        is_shared = sha256 in self._num_holding or self._uploads.expects(sha256)
        if not is_shared and not self._store.blob_references.is_needed(sha256, RETAINED_MODELS):
            self._delete(sha256)

    def drop_version(self, model: ModelRow) -> None:
        """Delete the blobs of a version unless they are needed."""
        self.drop(model.sha256)
        self.drop(model.sent_sha256)

    def drop_parts(self, run_id: str) -> None:
        """Delete the parts in which a run's newest version travelled: the run is over."""
        self._drop_all(part.sha256 for part in self._store.models.parts(run_id))

    def drop_updates(self, round_: RoundRow) -> None:
        """Delete the updates of an attempt that brought nothing."""
        updates = self._store.updates.of_attempt(round_.run, round_.number, round_.attempt)
        self._drop_all(update.sha256 for update in updates)

    def round_announced(self, round_: RoundRow, version: int) -> None:
        """A round's updates have become a version: delete them, and the version that is too old now."""
        for update in self._store.updates.of_attempt(round_.run, round_.number, round_.attempt):
            self._store.after_commit(partial(self._delete, update.sha256))
        old = self._store.models.get(round_.run, version - RETAINED_MODELS)
        if old is not None:
            self.drop_version(old)

    def forget_run(self, run: RunRow) -> None:
        """Remove a run that has ended, with all its rows and the blobs that nobody else needs."""
        models = self._store.models.all(run.id)
        self._store.runs.remove(run.id)
        blobs = {run.settings_sha256, run.task_sha256}
        blobs |= {sha256 for model in models for sha256 in (model.sha256, model.sent_sha256)}
        self._drop_all(sorted(blobs - {""}))

    def clean_up(self, run: RunRow | None) -> None:
        """At a start: delete every blob that no row needs, and unfinished uploads that `run` does not wait for."""
        last = self._store.rounds.last(run.id) if run is not None else None
        leases = self._store.leases.of_attempt(last.run, last.number, last.attempt) if last is not None else ()
        self._blobs.keep_only(self._store.blob_references.needed(RETAINED_MODELS), {lease.id for lease in leases})

    def _drop_all(self, blobs: Iterable[str]) -> None:
        for sha256 in blobs:
            self.drop(sha256)

    def _delete(self, sha256: str) -> None:
        self._downloads.blob_removed(sha256)
        self._blobs.remove(sha256)
