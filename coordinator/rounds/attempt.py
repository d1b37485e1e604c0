"""One attempt of a round: its leases, the updates that arrived, and the evaluations of the version that it sends.

    offered ──accept──> accepted ──store──> stored
       ^  └───────────────┤   └──close──> declined | refused | expired | cancelled
       └──offer_again─────┘

Covers: what happens to a lease, the receipts of its device, which answers are still expected.
Does not cover: time (`timer`, `offers`), when the round ends (`progress`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from coordinator.rounds import selection
from coordinator.rounds.candidates import is_lasting
from coordinator.rounds.events import Refused, Snapshot, Stored
from coordinator.rounds.instructions import CloseLease, SaveUpdate, SendCancel, SendReceipt
from coordinator.rounds.lease_book import LeaseBook
from coordinator.store.rows import EvaluationRow, LeaseRow, RoundRow, UpdateRow
from edge_client.data.input_sums import SUMS_ROUND
from edge_client.methods.slices import architecture

__all__ = ["Attempt"]


class Attempt:
    """The open attempt of a run; a round whose goal is 0 only evaluates, or asks for plans."""

    def __init__(
        self,
        row: RoundRow,
        leases: Iterable[LeaseRow],
        *,
        updates: Iterable[UpdateRow] = (),
        evaluations: Iterable[EvaluationRow] = (),
        dry: bool = False,
    ) -> None:
        self.row = row
        self._leases = LeaseBook(leases)
        self._updates = {update.device: update for update in updates}
        self._evaluations = {evaluation.device: evaluation for evaluation in evaluations}
        self._dry = dry

    @classmethod
    def restored(cls, row: RoundRow, snapshot: Snapshot) -> Attempt:
        """The attempt that was open when the store was written last."""
        updates, evaluations = snapshot.updates, snapshot.evaluations
        return cls(row, snapshot.leases, updates=updates, evaluations=evaluations, dry=snapshot.dry)

    @property
    def kind(self) -> str:
        """What it is called in the reasons that people read."""
        return "evaluation" if self.only_evaluates and not self.adds_sums else "round"

    @property
    def leases(self) -> Mapping[str, LeaseRow]:
        """All leases of the attempt, by id."""
        return self._leases.by_id

    @property
    def updates(self) -> Mapping[str, UpdateRow]:
        """The updates that arrived, by device."""
        return self._updates

    @property
    def evaluations(self) -> list[EvaluationRow]:
        """The evaluations that arrived."""
        return list(self._evaluations.values())

    @property
    def is_running(self) -> bool:
        """Whether updates are still accepted."""
        return self.row.state == "RUNNING"

    @property
    def only_evaluates(self) -> bool:
        """Whether nobody trains in this round."""
        return self.row.goal == 0

    @property
    def adds_sums(self) -> bool:
        """Whether this is the round before the first, in which devices report the sums of their inputs."""
        return self.row.number == SUMS_ROUND

    @property
    def is_complete(self) -> bool:
        """Whether as many updates arrived as the round wants."""
        return len(self._updates) >= self.row.goal

    @property
    def has_quorum(self) -> bool:
        """Whether enough updates arrived for the round to count."""
        return len(self._updates) >= self.row.quorum

    def open_lease(self, lease_id: str) -> LeaseRow | None:
        """A lease that has not ended, or None."""
        return self._leases.find_open(lease_id)

    def open_leases(self) -> list[LeaseRow]:
        """The leases that have not ended."""
        return self._leases.all_open()

    def open_leases_of(self, device: str) -> list[LeaseRow]:
        """The leases of a device that have not ended."""
        return self._leases.open_of(device)

    def is_expecting(self) -> bool:
        """Whether a device that trains may still answer; where nobody trains, whether any device may."""
        return self._leases.num_open(train=True) > 0 or (self.only_evaluates and self.is_expecting_evaluators())

    def is_expecting_evaluators(self) -> bool:
        """Whether a device that does not train may still answer."""
        return self._leases.num_open(train=False) > 0

    def devices_asked_to_train(self) -> set[str]:
        """The devices that train in this attempt, whatever became of it."""
        return {lease.device for lease in self.leases.values() if lease.train}

    def busy_devices(self) -> set[str]:
        """The devices that may still answer."""
        return self._leases.open_devices()

    @property
    def num_missing(self) -> int:
        """How many updates the round still wants."""
        return self.row.goal - len(self._updates)

    def reaches_quorum_with(self, num_more: int) -> bool:
        """Whether so many more updates would be enough for the round to count."""
        return len(self._updates) + num_more >= self.row.quorum

    def quorum_of_the_able(self, minimum: int) -> int:
        """The quorum of this round without the devices that gave a lasting reason, which the next attempt will have."""
        able = {
            lease.device
            for lease in self.leases.values()
            if lease.train and not (lease.state == "declined" and is_lasting(lease.code))
        }
        _, quorum = selection.goal_and_quorum(min(self.row.goal, len(able)), fraction=1.0, minimum=minimum)
        return max(minimum, quorum)

    def reason_of_failure(self) -> str:
        """Why too few updates arrived, for people."""
        reasons = sorted({f"{lease.device}: {lease.code}" for lease in self.leases.values() if lease.code})
        count = f"{len(self._updates)} of {self.row.quorum} needed updates"
        return f"{count} ({'; '.join(reasons) or 'deadline'})"

    # changes

    def add(self, leases: Iterable[LeaseRow]) -> None:
        """Further leases: substitutes, or a smaller slice for the same device."""
        for lease in leases:
            self._leases.put(lease)

    def accept(self, lease_id: str) -> list[CloseLease]:
        """A device accepted its lease."""
        lease = self._leases.find_open(lease_id)
        if lease is None or lease.state != "offered":
            return []
        self._leases.put(replace(lease, state="accepted"))
        return [CloseLease(lease_id, "accepted")]

    def offer_again(self, device: str, held_lease: str | None) -> list[str]:
        """A device holds another lease than the one it accepted (a new disk, an old backup): the leases to repeat."""
        lost = [lease for lease in self._leases.open_of(device) if lease.state == "accepted" and lease.id != held_lease]
        for lease in lost:
            self._leases.put(replace(lease, state="offered"))
        return [lease.id for lease in lost]

    def close(self, lease: LeaseRow, state: str, code: str, detail: str, log: Sequence[str] = ()) -> CloseLease:
        """End an open lease without an update."""
        self._leases.put(replace(lease, state=state, code=code, detail=detail, log=log))
        return CloseLease(lease.id, state, code, detail, log)

    def cancel_all(self, *, state: str, code: str, detail: str) -> list[CloseLease | SendCancel]:
        """End all open leases and tell their devices to stop."""
        return self._cancel(self.open_leases(), state, code, detail)

    def remove(self, device: str) -> list[CloseLease | SendCancel]:
        """A device is no longer enrolled: end its open leases."""
        return self._cancel(self._leases.open_of(device), "cancelled", "removed", "the device was removed")

    def _cancel(self, leases: Iterable[LeaseRow], state: str, code: str, detail: str) -> list[CloseLease | SendCancel]:
        instructions: list[CloseLease | SendCancel] = []
        for lease in leases:
            instructions += [self.close(lease, state, code, detail), SendCancel(lease.device, lease.id)]
        return instructions

    def store(self, lease: LeaseRow, stored: Stored) -> tuple[SaveUpdate, SendReceipt]:
        """An update of an open lease arrived: its row comes before its receipt."""
        keeps_report = lease.train or self._dry or self.adds_sums
        update = _update_row(lease, stored) if keeps_report else None
        evaluation = _evaluation_row(lease, stored)
        self._leases.put(replace(lease, state="stored"))
        if evaluation is not None:
            self._evaluations[lease.device] = evaluation
        if update is not None:
            self._updates[lease.device] = update
        return SaveUpdate(lease.id, update, evaluation), _receipt(lease, stored.sha256, "accepted")

    def repeat_receipt(self, lease: LeaseRow, sha256: str) -> SendReceipt:
        """The receipt for an update whose lease is closed: the same as the first time."""
        if lease.state != "stored":
            return _receipt(lease, sha256, "late", "late", "the round was over")
        counted = self._updates.get(lease.device)
        if counted is not None and counted.lease == lease.id and counted.sha256 != sha256:
            return _receipt(lease, sha256, "refused", "equivocation", "another update was stored")
        return _receipt(lease, sha256, "accepted")

    def refuse(self, refused: Refused) -> list[CloseLease | SendReceipt]:
        """An update failed a check; a lease that has ended keeps its first answer, which the device can ask for."""
        lease = self.open_lease(refused.lease)
        if lease is None:
            return []
        closed = self.close(lease, "refused", refused.code, refused.detail)
        return [closed, _receipt(lease, refused.sha256, "refused", refused.code, refused.detail)]


def _update_row(lease: LeaseRow, stored: Stored) -> UpdateRow:
    return UpdateRow(
        run=lease.run,
        round=lease.round,
        attempt=lease.attempt,
        device=lease.device,
        lease=lease.id,
        sha256=stored.sha256,
        length=stored.length,
        num_samples=stored.report.num_samples,
        norm=stored.norm,
        report=stored.report,
    )


def _evaluation_row(lease: LeaseRow, stored: Stored) -> EvaluationRow | None:
    evaluation = stored.report.evaluation
    if evaluation is None:
        return None
    return EvaluationRow(
        run=lease.run,
        version=lease.version,
        device=lease.device,
        num_samples=evaluation.num_samples,
        num_correct=evaluation.num_correct,
        loss_sum=evaluation.loss_sum,
        slice=architecture(lease.slice),
        confusion=stored.confusion,
    )


def _receipt(lease: LeaseRow, sha256: str, status: str, code: str = "ok", detail: str = "") -> SendReceipt:
    return SendReceipt(device=lease.device, lease=lease.id, sha256=sha256, status=status, code=code, detail=detail)
