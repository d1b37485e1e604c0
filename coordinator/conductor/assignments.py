"""What a device gets for its lease: the message, and the blobs that it may fetch until the lease ends."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.conductor.active_run import ActiveRun
from coordinator.conductor.model_parts import ModelParts
from coordinator.rounds.instructions import SendAssign
from coordinator.rounds.selection import seed_of
from coordinator.rounds.stopping import learning_rate
from coordinator.store.base import Store
from coordinator.store.rows import LeaseRow
from edge_client.wire.messages import Assign, Message

__all__ = ["Assignments"]


class Assignments:
    """The assignments of the active run."""

    def __init__(
        self,
        *,
        store: Store,
        parts: ModelParts,
        send: Callable[[str, Message], None],
        delayed: Callable[[str], None],
        epoch: int,
    ) -> None:
        """`delayed` is called with a lease whose assignment must wait for a part."""
        self._store = store
        self._parts = parts
        self._send = send
        self._delayed = delayed
        self._epoch = epoch

    def offer(self, run: ActiveRun, instruction: SendAssign) -> None:
        """Send an assignment; if a part that it names must be made first, send it as soon as that is there."""
        lease = instruction.lease
        missing = self._parts.missing(run, lease)
        if not missing:
            self._send(lease.device, self._message(run, lease, instruction.deadline_s))
            run.clock.note_lease(lease.id, "assign")
            return
        self._delayed(lease.id)
        name = missing[0]
        is_being_made = name in run.waiting
        run.waiting.setdefault(name, {})[lease.id] = instruction
        if not is_being_made:
            self._parts.make(run, name, lease, lambda is_current: self._offer_waiting(run, name, is_current))

    def _offer_waiting(self, run: ActiveRun, name: str, is_current: bool) -> None:
        waiting = run.waiting.pop(name, {})
        for instruction in waiting.values() if is_current else ():
            if run.open_lease(instruction.lease.device, instruction.lease.id) is not None:
                self.offer(run, instruction)

    def repair(self, run: ActiveRun) -> None:
        """After a restart: make lost parts of accepted leases again; other leases are offered anyway."""
        remaining_s = run.machine.round.remaining_s if run.machine.round is not None else 0.0
        for lease in [lease for lease in run.machine.leases.values() if lease.state == "accepted"]:
            if self._parts.missing(run, lease):
                self.offer(run, SendAssign(lease, remaining_s))

    def may_pull(self, run: ActiveRun, device: str, sha256: str) -> int | None:
        """The length of a blob that this device may fetch now, or None."""
        for lease in run.machine.open_leases_of(device):
            if not self._parts.missing(run, lease):
                lengths = {part.sha256: part.length for part in self._parts.refs(run, lease)}
                if sha256 in lengths:
                    run.clock.note_lease(lease.id, "fetch", again=True)
                    return lengths[sha256]
        return None

    def _message(self, run: ActiveRun, lease: LeaseRow, deadline_s: float) -> Assign:
        file = run.file
        return Assign(
            lease=lease.id,
            epoch=self._epoch,  # not the lease's: devices may have seen newer leases than a restored coordinator knows
            issue=lease.issue,
            run=lease.run,
            round=lease.round,
            num_rounds=file.stop.rounds,
            version=lease.version,
            train=lease.train,
            evaluate=lease.evaluate,
            seed=seed_of(file.seed, lease.round, lease.device),
            learning_rate=learning_rate(file.train, lease.round, file.stop.rounds),
            threads=file.train.threads,
            slice=lease.slice,
            plan=lease.plan,
            counted=self._store.updates.last_counted_lease(lease.run, lease.device),
            deadline_s=deadline_s,
            parts=self._parts.refs(run, lease),
        )
