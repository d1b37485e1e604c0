"""What the coordinator must not forget: devices, runs, rounds, leases, updates, models, evaluations, deployments.

Each method that writes is one transaction, durable when it returns. The order that makes a crash harmless is kept by
the callers: blob before row, row before receipt, commit before announcement.

    round   RUNNING -> FROZEN -> COMMITTED -> ANNOUNCED, or ABANDONED; a new attempt of an abandoned round is a new row
    lease   offered -> accepted -> stored | declined | refused | expired | cancelled
    run     queued -> running -> finished | stopped | failed
    deployment, per device    pending -> active | refused | rolled_back | superseded
                              active -> superseded | refused | rolled_back | pending (the device has lost it)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edge_client.records import Report, TrainingPlan

__all__ = [
    "OPEN_LEASE",
    "SERVER",
    "WANTED_DEPLOYMENT",
    "DeploymentRow",
    "DeviceRow",
    "EvaluationRow",
    "LeaseRow",
    "LeftOutRow",
    "ModelRow",
    "PartRow",
    "RoundRow",
    "RunRow",
    "Store",
    "UpdateRow",
]

OPEN_LEASE = ("offered", "accepted")
SERVER = "@server"  # no device's name
WANTED_DEPLOYMENT = ("pending", "active")  # a device uses this model, or is to


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """An enrolled device and its secrets."""

    name: str
    key: str  # hex, 32 bytes
    password: str
    labels: Mapping[str, str] = field(default_factory=dict)  # given here; they win over the device's own


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run: its resolved file and how it stands."""

    id: str
    file: Mapping[str, Any]
    state: str = "queued"
    reason: str = ""
    settings_sha256: str = ""  # the blob that devices fetch as part "run"
    settings_length: int = 0
    task_sha256: str = ""  # the blob of the task's source, if the run trains a task
    dry: bool = False  # asks for plans only
    best_version: int | None = None  # by the run's metric
    environment: Mapping[str, Any] = field(default_factory=dict)  # versions, commit and hardware, for the record
    created_s: int = 0  # wall clock, for people only


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A committed version: the server's own blob and the encoded one that travels (the same for fp32)."""

    run: str
    version: int  # 0 before the first round
    sha256: str
    length: int
    sent_sha256: str
    sent_length: int
    set_hash: str = ""  # of the frozen set it was made from
    score: float | None = None  # the run's metric, once it was judged


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """A slice of the newest version as it travels."""

    run: str
    version: int
    slice: str
    sha256: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """A round's attempt."""

    run: str
    number: int
    attempt: int = 1
    state: str = "RUNNING"
    goal: int = 0
    quorum: int = 0
    remaining_s: float = 0.0  # until the deadline, as last saved: the wall clock never decides
    extended: bool = False
    reason: str = ""
    elapsed_s: float = 0.0  # how long the run has been active, as last saved
    bytes_up: int | None = None  # what all devices had sent for the run when its end was announced
    bytes_down: int | None = None  # and got
    num_available: int = 0  # devices that could have been chosen for it


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRow:
    """One assignment to one device."""

    id: str
    issue: int  # grows with every lease; devices refuse older ones
    epoch: int
    run: str
    round: int
    attempt: int
    device: str
    train: bool
    evaluate: bool
    version: int  # of the model that was sent
    slice: str = "full"  # of it, what the device got
    plan: TrainingPlan | None = None
    state: str = "offered"
    code: str = ""
    detail: str = ""
    log: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRow:
    """A stored update; exactly one per (run, round, attempt, device)."""

    run: str
    round: int
    attempt: int
    device: str
    lease: str
    sha256: str
    length: int
    num_samples: int
    norm: float
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """A version's result on one device's own test data, or on the server's (`device` is `SERVER`)."""

    run: str
    version: int
    device: str
    num_samples: int
    num_correct: int
    loss_sum: float
    slice: str = "full"  # the architecture: how much of the model was judged
    confusion: Sequence[int] = ()  # row-major, as `records.Evaluation` describes it


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRow:
    """A model for one device: an ONNX file by its hash, and what became of it there."""

    id: str  # of the command that made it: the same for all its devices
    issue: int  # grows with every deployment
    device: str
    run: str
    version: int
    architecture: str
    precision: str
    sha256: str
    length: int
    input: Sequence[int]  # shape of one sample
    classes_sha256: str
    state: str = "pending"
    code: str = ""
    detail: str = ""
    created_s: int = 0  # wall clock, for people only


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutRow:
    """Knowledge that a run could not use, of a device or of all (`device` is empty); one per run, device and code."""

    run: str
    device: str
    code: str
    round: int  # the newest in which it was so
    detail: str


class Store(Protocol):
    """The contract; `tests/contracts/test_store.py` runs over every implementation.

    A broken constraint, such as a second update of a device in one attempt, is a bug of ours: `sqlite3.IntegrityError`.
    """

    def next_epoch(self, wall_s: int) -> int:
        """max(last + 1, wall clock): higher than all before, even after an older copy was restored."""

    def federation(self, fresh: str) -> str:
        """The federation's id; `fresh` at the very first start."""

    def setting(self, key: str) -> str: ...
    def set_setting(self, key: str, value: str) -> None: ...

    def devices(self) -> list[DeviceRow]: ...
    def add_device(self, *devices: DeviceRow, replace: bool = False) -> None: ...
    def set_labels(self, name: str, labels: Mapping[str, str]) -> None: ...
    def remove_device(self, name: str) -> None: ...

    def add_run(self, run: RunRow) -> None: ...
    def remove_run(self, run_id: str) -> None:
        """Forget a run and everything of it: only dry runs end so."""

    def save_score(self, run_id: str, version: int, score: float, best_version: int) -> None:
        """What the run's metric says of a version, and which version it likes best now."""

    def scores(self, run_id: str) -> dict[int, float]:
        """Version -> score, oldest first."""

    def remember_device(self, run_id: str, device: str, info: Mapping[str, Any]) -> None:
        """What a device was when it first took part in a run."""

    def remembered_devices(self, run_id: str) -> dict[str, dict[str, Any]]: ...
    def next_run_number(self, name: str) -> int: ...
    def runs(self) -> list[RunRow]: ...
    def run(self, run_id: str) -> RunRow | None: ...
    def first_run(self, state: str) -> RunRow | None: ...
    def set_run_state(self, run_id: str, state: str, reason: str = "") -> None: ...
    def fail_run(self, run_id: str, reason: str) -> None:
        """The run has failed, and with it its open round and leases, together."""

    def add_initial_model(self, model: ModelRow, settings_sha256: str, settings_length: int) -> None: ...
    def last_model(self, run_id: str) -> ModelRow | None: ...
    def model(self, run_id: str, version: int) -> ModelRow | None: ...
    def models(self, run_id: str) -> list[ModelRow]: ...
    def add_part(self, part: PartRow) -> list[PartRow]:
        """A slice of the newest version; returns those of older versions, which are forgotten."""

    def parts(self, run_id: str) -> list[PartRow]: ...

    def open_round(self, round_: RoundRow, leases: Sequence[LeaseRow]) -> None: ...
    def add_leases(self, leases: Sequence[LeaseRow]) -> None: ...
    def next_issue(self) -> int: ...
    def last_round(self, run_id: str) -> RoundRow | None: ...
    def rounds(self, run_id: str) -> list[RoundRow]: ...
    def leases(self, run_id: str, number: int, attempt: int) -> list[LeaseRow]: ...
    def lease(self, lease_id: str) -> LeaseRow | None: ...
    def set_lease(
        self, lease_id: str, state: str, *, code: str = "", detail: str = "", log: Sequence[str] = ()
    ) -> None: ...
    def recent_failures(self, device: str, limit: int) -> list[LeaseRow]:
        """A device's newest leases that brought nothing and have a reason, newest first."""

    def run_failures(self, run_id: str, limit: int) -> list[LeaseRow]:
        """The same of a run."""

    def save_deadline(
        self, run_id: str, number: int, attempt: int, *, remaining_s: float, extended: bool, elapsed_s: float
    ) -> None: ...

    def save_update(
        self,
        update: UpdateRow | None,
        evaluation: EvaluationRow | None,
        lease_id: str,
        traffic: Mapping[str, tuple[int, int]] = {},
    ) -> None:
        """The update's row, its evaluation, its lease's end and what travelled for it (`add_traffic`), together."""

    def drop_update(self, update: UpdateRow) -> None:
        """An update's blob is lost: forget its row and offer its lease again, in a round that is running again."""

    def updates(self, run_id: str, number: int, attempt: int) -> list[UpdateRow]: ...
    def recent_updates(self, run_id: str, limit: int) -> list[UpdateRow]: ...
    def num_updates(self, run_id: str) -> dict[int, int]:
        """Round -> how many updates its model was made of; rounds without a model are left out."""

    def update_of_lease(self, lease_id: str) -> UpdateRow | None: ...
    def last_counted_lease(self, run_id: str, device: str) -> str | None: ...
    def freeze(self, run_id: str, number: int, attempt: int, set_hash: str) -> None: ...
    def commit_round(self, number: int, attempt: int, model: ModelRow, left_out: Sequence[LeftOutRow] = ()) -> None:
        """The new version, the end of its round and what knowledge it was made without, together."""

    def left_out(self, run_id: str) -> list[LeftOutRow]:
        """What a run could not use, by device and code."""

    def announce(self, run_id: str, number: int, attempt: int) -> None:
        """The devices have been told; what has travelled for the run by now is kept with the round."""

    def abandon(self, run_id: str, number: int, attempt: int, reason: str) -> None: ...

    def save_evaluation(self, evaluation: EvaluationRow) -> None: ...
    def evaluations(self, run_id: str, version: int | None = None) -> list[EvaluationRow]: ...
    def evaluated_versions(self, run_id: str) -> list[int]: ...
    def last_plans(self, run_id: str) -> dict[str, TrainingPlan]: ...
    def recent_norms(self, run_id: str, rounds: int) -> dict[str, list[float]]:
        """Slice -> norms of the updates of the newest committed rounds: the usual size of a change."""

    def drop_rate(self, run_id: str, leases: int) -> float: ...
    def add_traffic(self, run_id: str, moved: Mapping[str, tuple[int, int]]) -> None: ...
    def traffic(self, run_id: str) -> dict[str, tuple[int, int]]: ...
    def trained_slices(self, run_id: str) -> dict[str, str]:
        """Device -> the slice that it trained last in a run."""

    def next_deployment(self) -> int:
        """The issue of the next deployment."""

    def add_deployment(self, rows: Sequence[DeploymentRow]) -> list[DeploymentRow]:
        """A deployment to these devices; returns what was pending on them, which is superseded now.

        What is active on them stays so until something else is.
        """

    def deployments(self, run_id: str | None = None) -> list[DeploymentRow]:
        """All of a run, or all, the oldest first, and by device."""

    def wanted_deployments(self) -> list[DeploymentRow]:
        """Those that are pending or active: at most one of each per device, and the pending one is newer."""

    def set_deployment(
        self, deployment: str, device: str, state: str, *, code: str = "", detail: str = ""
    ) -> list[DeploymentRow]:
        """What became of a deployment on a device; returns what was active there, if it is superseded now."""

    def needed_blobs(self, keep_models: int) -> set[str]: ...
    def is_needed(self, sha256: str, keep_models: int) -> bool: ...
    def backup(self, path: Path) -> None:
        """A consistent copy of everything into a new file, while the store is in use."""

    def close(self) -> None: ...
