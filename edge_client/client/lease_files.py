"""The files of a device's lease: the saved state, the parts, the worker's folder and the states of methods.

STATE/state.json           the lease, its finished update, the newest assignment seen (`spool`)
STATE/blobs/, STATE/tmp/   parts, whole and on their way
STATE/work/LEASE/          what the worker of that lease reads and writes
STATE/method-state/RUN/    what the run's method keeps between rounds (`method_state`)
STATE/privacy-ledger       what differential privacy has used up
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from edge_client import durable
from edge_client.client.events import UpdateLost, WorkerDone, WorkerFailed
from edge_client.client.instructions import Save
from edge_client.client.method_state import count_method_state, settle_method_state
from edge_client.client.spool import Saved, Spool
from edge_client.client.worker_outcome import finished_update, saved_failure
from edge_client.records import Ceiling, PartRef
from edge_client.transport.blobs import BlobStore
from edge_client.wire.messages import Assign

__all__ = ["LeaseFiles"]

log = logging.getLogger(__name__)


class LeaseFiles:
    """The files of one device; see the module's docstring."""

    def __init__(self, state_dir: Path, *, disk_limit_bytes: int) -> None:
        """`disk_limit_bytes` is what the device's owner allows."""
        self.blobs = BlobStore(state_dir / "blobs", state_dir / "tmp")
        self.ledger = state_dir / "privacy-ledger"
        self._state_dir = state_dir
        self._disk_limit_bytes = disk_limit_bytes
        self._spool = Spool(state_dir / "state.json")

    @property
    def saved(self) -> Saved:
        """The state that the next start would read."""
        return self._spool.load()

    def work_dir(self, lease: str) -> Path:
        """The folder of the worker of a lease."""
        return self._state_dir / "work" / lease

    def method_state(self, run: str) -> Path:
        """The folder of the method of a run."""
        return self._state_dir / "method-state" / run

    def free_bytes(self) -> int:
        """How many bytes may still be written."""
        return min(durable.free_bytes(self._state_dir), self._disk_limit_bytes)

    def save(self, save: Save) -> bool:
        """Write the lease and its state, durably; returns whether this lease is new."""
        assign, update = save.assign, save.update
        before = self.saved.assign
        self._spool.save(assign, update, save.attempts, save.replans)
        if update is not None:
            log.info("run %s round %d: finished, %d bytes to send", assign.run, assign.round, update.length)
            return False
        is_new = before is None or before.lease != assign.lease
        if is_new:
            log.info("run %s round %d: assigned (lease %s)", assign.run, assign.round, assign.lease)
        return is_new

    def remember(self, ceiling: Ceiling) -> None:
        """Keep a plan that needs too much memory for this device; durable with the next `save` or `forget`."""
        self._spool.remember(ceiling)

    def ceilings(self, budget_bytes: int) -> dict[str, int]:
        """How many bytes are too much for a budget, by the key of model and training."""
        return self._spool.ceilings(budget_bytes)

    def accelerator_ceilings(self) -> tuple[Ceiling, ...]:
        """What went over the accelerator's memory in earlier work."""
        return self._spool.accelerator_ceilings()

    def event_since_stop(self, assign: Assign) -> UpdateLost | WorkerDone | WorkerFailed | None:
        """The event of a worker that ended while no daemon ran; a finished update is not trained again."""
        update, folder = self.saved.finished, self.work_dir(assign.lease)
        update_on_disk = finished_update(folder)
        if update is None:
            done = WorkerDone(assign.lease, update_on_disk) if update_on_disk is not None else None
            return done or saved_failure(assign.lease, folder)
        return None if update_on_disk == update else self.update_lost(assign.lease)

    def update_lost(self, lease: str) -> UpdateLost:
        """The event of a finished update that the disk lost."""
        log.error("the finished update of lease %s is not on disk any more; training it again", lease)
        return UpdateLost(lease)

    def clean_up(self, assign: Assign | None, *, other_parts: Sequence[PartRef] = ()) -> None:
        """Keep only what the lease in hand needs, and `other_parts`.

        Without a lease what may serve the next one stays: parts and states of methods. Nothing is being fetched.
        """
        if assign is not None:
            wanted = {part.sha256 for part in (*assign.parts, *other_parts)}
            self.blobs.keep_only(wanted, wanted)
            self._keep_folder("method-state", assign.run)  # one run trains at a time: the others are over
            in_hand = assign.lease if self.saved.finished is not None else None  # settled, and not forgotten yet
            with durable.disk_errors("cannot keep the method's state"):
                count_method_state(self.method_state(assign.run), assign.counted, in_hand=in_hand)
        self._keep_folder("work", assign.lease if assign else None)

    def forget(self, lease: str, *, accepted: bool) -> None:
        """The lease is over; what its method wrote stays if the update was accepted."""
        with durable.disk_errors("cannot keep the method's state"):
            settle_method_state(self._state_dir / "method-state", lease, accepted=accepted)
        self._spool.forget()
        _remove(self.work_dir(lease))
        log.info("lease %s is over (%s)", lease, "accepted" if accepted else "not used")

    def _keep_folder(self, below: str, name: str | None) -> None:
        for folder in (self._state_dir / below).glob("*"):
            if folder.name != name:
                _remove(folder)


def _remove(folder: Path) -> None:
    import shutil  # brings bz2 and lzma: half a megabyte that an idle client need not hold

    shutil.rmtree(folder, ignore_errors=True)
