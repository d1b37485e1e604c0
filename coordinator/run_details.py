"""A run in detail, as the coordinator answers `run-show`: results, devices, failures, what it waits for.

Covers: the records; their JSON has the same names. Does not cover: filling them in (`requests.run_overview`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_client.config.run_file import RunFile
from edge_client.records import DeviceProfile, TrainingPlan, later

__all__ = [
    "OMIT_NONE",
    "Candidate",
    "DeviceEvaluation",
    "FailedLease",
    "LeftOut",
    "ModelVersion",
    "RoundAttempt",
    "RoundTraffic",
    "RoundUpdates",
    "RunDetails",
    "RunDevice",
    "RunLease",
    "RunLine",
    "RunProgress",
    "VersionResult",
    "plain",
]

OMIT_NONE = {"omit-none": True}  # metadata of a field that is left out of the JSON while it is None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """A run in a line."""

    run: str
    state: str
    reason: str
    round: int  # done
    rounds: int  # at most
    method: str
    model: str
    metric: str
    best_version: int | None
    best_score: float | None
    waits_for: str | None  # the run that trains


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """A version that the store keeps."""

    version: int
    sha256: str
    bytes: int
    score: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionResult:
    """A version judged on all test samples of the devices that answered, or of the server."""

    version: int
    num_devices: int  # 0: the server judged it
    num_samples: int
    accuracy: float
    loss: float
    balanced_accuracy: float
    macro_f1: float
    recall: tuple[float | None, ...]  # by class; None for a class that nobody has
    per_architecture: Mapping[str, float]  # accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvaluation:
    """A version on the test data of one device, or of the server."""

    version: int
    device: str
    slice: str
    num_samples: int
    accuracy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAttempt:
    """An attempt of a round."""

    run: str
    number: int
    attempt: int
    state: str
    goal: int
    quorum: int
    remaining_s: float
    extended: bool
    reason: str
    elapsed_s: float
    bytes_up: int | None
    bytes_down: int | None
    num_available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTraffic:
    """What travelled in a round."""

    round: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundUpdates:
    """How many updates a round's model was made of."""

    round: int
    num_updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLease:
    """An assignment of the open or newest round."""

    id: str
    issue: int
    epoch: int
    run: str
    round: int
    attempt: int
    device: str
    train: bool
    evaluate: bool
    version: int
    slice: str
    plan: TrainingPlan | None
    state: str
    code: str
    detail: str
    log: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLease:
    """An assignment that brought nothing: who, when, why, and the last lines of its log."""

    device: str
    round: int
    attempt: int
    state: str
    code: str
    detail: str
    log: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What the run has to do without, of a device or of all."""

    device: str | None
    round: int
    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDevice:
    """A device over all rounds; peak, prediction and budget are of the round in which it came nearest to its budget."""

    id: str
    peak_bytes: int
    predicted_bytes: int
    budget_bytes: int
    inside_budget: bool
    replans: int
    plan: str  # the newest
    plan_details: TrainingPlan | None
    base_bytes: int
    num_samples: int
    num_test: int
    versions: Mapping[str, str]
    round: int  # the newest
    bytes_up: int
    bytes_down: int
    client: str | None = field(default=None, metadata=OMIT_NONE)  # as it was in its first round, like the next two
    profile: DeviceProfile | None = field(default=None, metadata=OMIT_NONE)
    labels: Mapping[str, str] | None = field(default=None, metadata=OMIT_NONE)
    accelerator_peak_bytes: int = later(0)  # of the round whose peak was the highest there; 0: it trained on the CPU
    peak_rss_bytes: int | None = field(default=None, metadata=OMIT_NONE)  # beside the peak, which is private memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An enrolled device; code and detail tell why a run does not ask it, and are empty if it does."""

    id: str
    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How the active run stands now."""

    phase: str
    round: int
    waiting: str  # for what; empty if it does not wait
    candidates: tuple[Candidate, ...]  # of a large fleet the first, by name
    num_candidates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails(RunLine):
    """Everything about a run; of a long one the newest, and counts of all. The last three are for its report."""

    dry: bool
    file: RunFile
    environment: Mapping[str, Any]
    created_s: int
    models: tuple[ModelVersion, ...]
    num_models: int
    payload_bytes: int | None
    evaluations: tuple[VersionResult, ...]
    num_evaluations: int
    device_evaluations: tuple[DeviceEvaluation, ...]
    round_rows: tuple[RoundAttempt, ...]
    moved_by_round: tuple[RoundTraffic, ...]
    leases: tuple[RunLease, ...]
    failures: tuple[FailedLease, ...]
    left_out: tuple[LeftOut, ...]
    devices: tuple[RunDevice, ...]
    barred: tuple[Candidate, ...]
    progress: RunProgress | None
    updates_by_round: tuple[RoundUpdates, ...] | None = field(default=None, metadata=OMIT_NONE)
    whole_model_bytes: int | None = field(default=None, metadata=OMIT_NONE)
    similarity: Mapping[str, Any] | None = field(default=None, metadata=OMIT_NONE)  # `results.similarity_record`


def plain(record: Any) -> dict[str, Any]:
    """`default` of `json.dumps` for records: a dict of the fields by their keys; the encoder handles their values."""
    if isinstance(record, Mapping):
        return dict(record)
    cls: Any = type(record)
    if not hasattr(cls, "__dataclass_fields__"):
        raise TypeError(f"expected a record, got {cls.__name__}")
    values = ((key, getattr(record, name), omits_none) for key, name, omits_none in _fields(cls))
    return {key: value for key, value, omits_none in values if not (omits_none and value is None)}


@functools.cache
def _fields(cls: Any) -> tuple[tuple[str, str, bool], ...]:
    return tuple((f.metadata.get("key") or f.name, f.name, "omit-none" in f.metadata) for f in dataclasses.fields(cls))
