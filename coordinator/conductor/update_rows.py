"""Writing what a device sent: the update's row, with what travelled for it, and once what the device is.

Whatever becomes of this process, the bytes that travelled are counted once. The bytes of a small update are part of
the same transaction; those of a large one are a blob by then.
Covers: the rows, and the files of small updates that a power cut took. Does not cover: whether an update counts
(`rounds`).
"""

from __future__ import annotations

from coordinator.conductor.active_run import ActiveRun
from coordinator.fleet.roster import Roster
from coordinator.fleet.small_uploads import SMALL_UPDATE_BYTES, write_small
from coordinator.fleet.traffic import TrafficMeter
from coordinator.rounds.instructions import SaveUpdate
from coordinator.store.base import Store
from coordinator.store.rows import UpdateRow
from edge_client import durable
from edge_client.records import to_map
from edge_client.transport.blobs import BlobStore

__all__ = ["UpdateRows", "has_update"]


def has_update(store: Store, blobs: BlobStore, update: UpdateRow) -> bool:
    """Whether the bytes of a stored update are here; the file of a small one is written again from its row."""
    if blobs.verified(update.sha256):
        return True
    body = store.updates.body(update.lease)
    if body is None:
        return False
    write_small(blobs, body, update.sha256)
    return True


class UpdateRows:
    """Saves updates of the active run."""

    def __init__(self, *, store: Store, blobs: BlobStore, roster: Roster, traffic: TrafficMeter) -> None:
        self._store = store
        self._blobs = blobs
        self._roster = roster
        self._traffic = traffic

    def save(self, run: ActiveRun, saved: SaveUpdate) -> None:
        """Write an update, or an evaluation that came without one."""
        lease = run.machine.leases.get(saved.lease)  # None if the machine is past its round
        moments, phases = run.clock.of_lease(saved.lease)
        self._store.updates.save(
            saved.update,
            saved.evaluation,
            saved.lease,
            self._traffic.take(lease.device) if lease is not None else {},
            moments=moments,
            phases=phases,
            body=self._body(saved.update),
        )
        run.work.stored(saved)
        if lease is not None:
            self._describe_device(run, lease.device)

    def _body(self, update: UpdateRow | None) -> bytes | None:
        if update is None or update.length > SMALL_UPDATE_BYTES:
            return None
        with durable.disk_errors(f"cannot read the update of {update.device!r}"):
            return self._blobs.path(update.sha256).read_bytes()

    def _describe_device(self, run: ActiveRun, device: str) -> None:
        """Save once what a device was in this run."""
        present = self._roster.presence(device)
        if present is not None and device not in run.described:
            run.described.add(device)
            info = {"client": present.client, "profile": to_map(present.profile)}
            self._store.runs.save_device_info(run.id, device, {**info, "labels": self._roster.labels_of(device)})
