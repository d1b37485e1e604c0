"""What happens to a run, as records: the only input of the round machine after the snapshot that it starts from.

Covers: events, and the snapshot. Does not cover: what the machine answers (`instructions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from coordinator.store.rows import EvaluationRow, LeaseRow, ModelRow, RoundRow, UpdateRow
from edge_client.config.run_file import RunFile
from edge_client.records import Report, TrainingPlan

__all__ = [
    "Accepted",
    "AssignmentDelayed",
    "Declined",
    "DropRateObserved",
    "Event",
    "Folded",
    "Holding",
    "Judged",
    "Refused",
    "Removed",
    "Resumed",
    "Returned",
    "Snapshot",
    "StopAsked",
    "Stored",
    "Tick",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the store knows about a run: enough to continue it after a restart."""

    run: str
    file: RunFile
    epoch: int
    version: int
    round: RoundRow | None = None
    leases: Sequence[LeaseRow] = ()
    updates: Sequence[UpdateRow] = ()
    plans: Mapping[str, TrainingPlan] = field(default_factory=dict)
    drop_rate: float = 0.0
    scores: Mapping[int, float] = field(default_factory=dict)
    evaluations: Sequence[EvaluationRow] = ()  # of the version that is sent in the open round
    dry: bool = False
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Resumed:
    """The process has started: the machine answers with what the last process left undone."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The devices in `online` may be asked; `num_enrolled` could be asked if all were connected."""

    online: frozenset[str]
    num_enrolled: int


@dataclass(frozen=True, slots=True)
class DropRateObserved:
    """The share of recent leases that ended without an update has changed."""

    drop_rate: float


@dataclass(frozen=True, slots=True)
class AssignmentDelayed:
    """An assignment was not sent yet, because a part that it names must be made first."""

    lease: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """A device accepted its lease."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """A device will not fulfil its lease, or could not."""

    lease: str
    code: str
    detail: str = ""
    log: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Holding:
    """A device reported the lease that it is working on, or None."""

    device: str
    lease: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An update is on disk and passed every check; `confusion` belongs to the report's evaluation, if it has one."""

    lease: str
    sha256: str
    length: int
    norm: float
    report: Report
    confusion: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An update failed a check and was deleted."""

    lease: str
    sha256: str
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A device is no longer enrolled."""

    device: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A device has restarted: what it could not do before, it may be able to do now."""

    device: str


@dataclass(frozen=True, slots=True)
class Judged:
    """A version was evaluated on the server's own test data: one row for each slice that the devices train."""

    evaluations: Sequence[EvaluationRow]


@dataclass(frozen=True, slots=True)
class Folded:
    """The next version is on disk."""

    model: ModelRow


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the run to end: now, or after its round."""

    now: bool


Event: TypeAlias = (
    Resumed
    | Tick
    | DropRateObserved
    | AssignmentDelayed
    | Accepted
    | Declined
    | Holding
    | Stored
    | Refused
    | Removed
    | Returned
    | Folded
    | Judged
    | StopAsked
)
