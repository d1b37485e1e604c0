"""What the round machine wants done, as records: its only output.

Covers: instructions. Does not cover: carrying them out (`conductor`), what causes them (`events`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from coordinator.store.rows import EvaluationRow, LeaseRow, ModelRow, RoundRow, UpdateRow

__all__ = [
    "Abandon",
    "AddLeases",
    "Announce",
    "CloseLease",
    "Commit",
    "Finish",
    "Fold",
    "Freeze",
    "Instruction",
    "Judge",
    "OpenRound",
    "SaveDeadline",
    "SaveScore",
    "SaveUpdate",
    "SendAssign",
    "SendCancel",
    "SendReceipt",
]


@dataclass(frozen=True, slots=True)
class OpenRound:
    """Write the round and its leases."""

    round: RoundRow
    leases: tuple[LeaseRow, ...]


@dataclass(frozen=True, slots=True)
class AddLeases:
    """Write leases that were added to the open round."""

    leases: tuple[LeaseRow, ...]


@dataclass(frozen=True, slots=True)
class SendAssign:
    """Offer a lease to its device."""

    lease: LeaseRow
    deadline_s: float


@dataclass(frozen=True, slots=True)
class CloseLease:
    """Write how a lease ended (or that it was accepted)."""

    lease: str
    state: str
    code: str = ""
    detail: str = ""
    log: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell a device to stop working on a lease."""

    device: str
    lease: str


@dataclass(frozen=True, slots=True)
class SaveUpdate:
    """Write the update's row, its evaluation and the end of its lease."""

    lease: str
    update: UpdateRow | None
    evaluation: EvaluationRow | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReceipt:
    """Tell a device what became of its update."""

    device: str
    lease: str
    sha256: str
    status: str
    code: str = "ok"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Write that the set of updates is final."""

    round: RoundRow
    set_hash: str


@dataclass(frozen=True, slots=True)
class Fold:
    """Make the next version from the frozen set; answer with `Folded`."""

    round: RoundRow
    updates: tuple[UpdateRow, ...]
    set_hash: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the new version and the end of the round."""

    round: RoundRow
    model: ModelRow


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell all devices, delete the round's updates, and write that this is done."""

    round: RoundRow
    version: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Write that the attempt ended without a new version."""

    round: RoundRow
    reason: str


@dataclass(frozen=True, slots=True)
class SaveScore:
    """Write a version's value of the run's metric, and which version is the best."""

    version: int
    score: float
    best_version: int


@dataclass(frozen=True, slots=True)
class Judge:
    """Evaluate a version on the server's own test data; answer with `Judged`."""

    version: int


@dataclass(frozen=True, slots=True)
class SaveDeadline:
    """Write how much time the round has left."""

    round: RoundRow


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run."""

    state: str
    reason: str


Instruction: TypeAlias = (
    OpenRound
    | AddLeases
    | SendAssign
    | CloseLease
    | SendCancel
    | SaveUpdate
    | SendReceipt
    | Freeze
    | Fold
    | Commit
    | Announce
    | Abandon
    | SaveDeadline
    | SaveScore
    | Judge
    | Finish
)
