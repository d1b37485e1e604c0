"""What each device did last in one run: its newest lease, how that ended, and its newest report. For those who look.

It is kept in memory, from the instructions that the conductor carries out, so that whoever shows a fleet asks the store
nothing. After a restart it begins with the newest updates that the store has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from coordinator.rounds.instructions import CloseLease, SaveUpdate
from coordinator.store.rows import EvaluationRow, LeaseRow, UpdateRow
from edge_client.records import Report

__all__ = ["DeviceWork", "WorkLog"]

_FAILED = ("declined", "refused", "expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """What one device did last in a run."""

    round: int = 0  # of its newest lease
    lease: str = ""  # the state of that lease, such as "accepted" or "stored"
    why: str = ""  # why that lease brought nothing
    reported_in: int = 0  # the round of its newest update; 0: none yet
    predicted_bytes: int = 0  # of the plan of that update
    budget_bytes: int = 0  # the same
    peak_bytes: int = 0  # measured while it trained
    accuracy: float | None = None  # on its own test data, of the last version that it evaluated


class WorkLog:
    """The devices of one run; for the loop's thread."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        """`changed` is called with the name of a device about which something is new."""
        self._changed = changed
        self._devices: dict[str, DeviceWork] = {}
        self._leases: dict[str, str] = {}  # lease of the open attempt -> its device

    def of(self, device: str) -> DeviceWork | None:
        """What a device did last; None if it took no part yet."""
        return self._devices.get(device)

    def load(self, leases: Iterable[LeaseRow], updates: Iterable[UpdateRow]) -> None:
        """After a restart: the leases of the open attempt, and the newest update of each device."""
        for update in updates:
            self._put(update.device, _reported(self._work(update.device), update.round, update.report))
        self.opened(leases)

    def opened(self, leases: Iterable[LeaseRow], *, is_new_attempt: bool = True) -> None:
        """An attempt begins with these leases, or an open one gets more."""
        if is_new_attempt:
            self._leases.clear()
        for lease in leases:
            self._leases[lease.id] = lease.device
            why = _why(lease.code, lease.detail) if lease.state in _FAILED else ""
            self._put(lease.device, replace(self._work(lease.device), round=lease.round, lease=lease.state, why=why))

    def closed(self, closed: CloseLease) -> None:
        """A lease has another state."""
        device = self._leases.get(closed.lease)
        if device is not None:
            why = _why(closed.code, closed.detail) if closed.state in _FAILED else ""
            self._put(device, replace(self._work(device), lease=closed.state, why=why))

    def stored(self, saved: SaveUpdate) -> None:
        """An update, or an evaluation, was stored."""
        device = self._leases.get(saved.lease)
        if device is None:
            return
        work = replace(self._work(device), lease="stored", why="")
        if saved.update is not None:
            work = _reported(work, saved.update.round, saved.update.report)
        if saved.evaluation is not None:
            work = replace(work, accuracy=_accuracy(saved.evaluation))
        self._put(device, work)

    def _work(self, device: str) -> DeviceWork:
        return self._devices.get(device) or DeviceWork()

    def _put(self, device: str, work: DeviceWork) -> None:
        self._devices[device] = work
        self._changed(device)


def _reported(work: DeviceWork, round_: int, report: Report) -> DeviceWork:
    evaluation = report.evaluation
    has_result = evaluation is not None and evaluation.num_samples > 0
    predicted_bytes, budget_bytes, peak_bytes = _memory(report)
    return replace(
        work,
        reported_in=round_,
        predicted_bytes=predicted_bytes,
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        accuracy=evaluation.num_correct / evaluation.num_samples if evaluation and has_result else work.accuracy,
    )


def _memory(report: Report) -> tuple[int, int, int]:
    """Predicted, allowed and measured bytes: of private memory where the budget is for that, otherwise RSS."""
    plan = report.plan
    if plan is None:
        return 0, 0, report.peak_bytes
    if plan.private_budget_bytes and report.private_peak_bytes:
        return plan.private_predicted_bytes, plan.private_budget_bytes, report.private_peak_bytes
    return plan.predicted_bytes, plan.budget_bytes, report.peak_bytes


def _accuracy(row: EvaluationRow) -> float | None:
    return row.num_correct / row.num_samples if row.num_samples else None


def _why(code: str, detail: str) -> str:
    return f"{code}: {detail}" if code and detail else code or detail
