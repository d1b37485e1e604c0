"""The rows of the store: frozen records, one class per table that is read as a whole.

round   RUNNING -> FROZEN -> COMMITTED -> ANNOUNCED, or ABANDONED; a new attempt of an abandoned round is a new row
lease   offered -> accepted -> stored | declined | refused | expired | cancelled
run     queued -> running -> finished | stopped | failed
deployment, per device    pending -> active | refused | rolled_back | superseded
                          active -> superseded | refused | rolled_back | pending (the device has lost it)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_client.records import Report, TrainingPlan

__all__ = [
    "OPEN_LEASE",
    "PAGE_ROLES",
    "SERVER",
    "WANTED_DEPLOYMENT",
    "DeploymentRow",
    "DeviceRow",
    "EvaluationRow",
    "LeaseRow",
    "LeftOutRow",
    "ModelRow",
    "PageActionRow",
    "PageSessionRow",
    "PageTokenRow",
    "PartRow",
    "RoundRow",
    "RunRow",
    "UpdateRow",
]

OPEN_LEASE = ("offered", "accepted")
SERVER = "@server"  # no device can have this name
PAGE_ROLES = ("read", "operate")
WANTED_DEPLOYMENT = ("pending", "active")  # a device uses this model, or will


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """An enrolled device and its secrets."""

    name: str
    key: str  # hex, 32 bytes
    password: str
    labels: Mapping[str, str] = field(
        default_factory=dict
    )  # set at the coordinator; they take precedence over those that the device reports


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run: its resolved file, and its state."""

    id: str
    file: Mapping[str, Any]
    state: str = "queued"
    reason: str = ""
    settings_sha256: str = ""  # the blob that devices download as the part "run"
    settings_length: int = 0
    task_sha256: str = ""  # the blob of the task's source, for runs that train a task
    dry: bool = False  # whether devices only report their plans
    best_version: int | None = None  # according to the run's metric
    environment: Mapping[str, Any] = field(default_factory=dict)  # versions, commit and hardware, for the record
    created_s: int = 0  # wall clock; only shown, never compared


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A committed version: the blob that the server works with, and the one that it sends (the same for fp32)."""

    run: str
    version: int  # 0 before the first round
    sha256: str
    length: int
    sent_sha256: str
    sent_length: int
    set_hash: str = ""  # of the frozen set of updates that it was made from
    score: float | None = None  # the run's metric, after the evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """A part of the newest version as devices download it: a slice, or knowledge."""

    run: str
    version: int
    slice: str
    sha256: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """An attempt of a round."""

    run: str
    number: int
    attempt: int = 1
    state: str = "RUNNING"
    goal: int = 0
    quorum: int = 0
    remaining_s: float = 0.0  # until the deadline, when it was last saved; the wall clock does not count
    extended: bool = False
    reason: str = ""
    elapsed_s: float = 0.0  # how long the run had been active, when it was last saved
    bytes_up: int | None = None  # by all devices for the run, until its end was announced
    bytes_down: int | None = None  # to all devices
    num_available: int = 0  # how many devices could have been selected
    moments: Mapping[str, float] = field(default_factory=dict)  # `round_clock`: seconds since the attempt began


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
    version: int  # of the model that the device gets
    slice: str = "full"  # the slice of it that the device gets
    plan: TrainingPlan | None = None
    state: str = "offered"
    code: str = ""
    detail: str = ""
    log: Sequence[str] = ()
    moments: Mapping[str, float] = field(default_factory=dict)  # `round_clock`: seconds since the attempt began
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of the device's work, as it reports them

    @property
    def needs_no_model(self) -> bool:
        """Whether only a plan is asked for (a dry run), or the sums of the device's inputs."""
        return not (self.train or self.evaluate)


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
    """A version's result on the test data of a device, or of the server (`device` is `SERVER`)."""

    run: str
    version: int
    device: str
    num_samples: int
    num_correct: int
    loss_sum: float
    slice: str = "full"  # the architecture that was evaluated
    confusion: Sequence[int] = ()  # row-major, as `records.Evaluation` describes it


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRow:
    """An exported model for one device: its ONNX file, and what became of it there."""

    id: str  # of the command, the same for all its devices
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
    created_s: int = 0  # wall clock; only shown, never compared


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutRow:
    """Knowledge of a device, or of all devices (`device` is empty), that a run could not use.

    There is one row for each run, device and code.
    """

    run: str
    device: str
    code: str
    round: int  # the newest in which it was not used
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTokenRow:
    """Who may use the page and its API for as long as the token exists; the token itself is not stored."""

    name: str
    sha256: str
    role: str  # one of PAGE_ROLES
    created_s: int  # wall clock
    used_s: int = 0  # the last day or minute in which it was used; 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSessionRow:
    """A browser that signed in; it presents a cookie of which this is the hash."""

    sha256: str
    name: str  # of the token, or of the link
    role: str
    csrf: str  # what the page sends beside the cookie with everything that changes something
    expires_s: int  # wall clock


@dataclass(frozen=True, slots=True, kw_only=True)
class PageActionRow:
    """Something that somebody did on the page."""

    at_s: int  # wall clock
    name: str
    action: str
    detail: str
