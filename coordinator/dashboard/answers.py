"""The answers of the API as records; `openapi` describes them, and their JSON has the same names.

Ages are seconds before the answer was made, because a viewer's clock may be another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ActionLine",
    "Alert",
    "ApiError",
    "ApiErrorBody",
    "CompareAnswer",
    "ComparedRun",
    "Curve",
    "CurvePoint",
    "DeviceAnswer",
    "DeviceFailureAnswer",
    "DevicePage",
    "DeviceRound",
    "DeviceRounds",
    "DeviceRow",
    "DeviceSpans",
    "Done",
    "FleetAnswer",
    "JobAnswer",
    "Live",
    "LogLineAnswer",
    "LogPage",
    "NewRun",
    "PhaseArea",
    "RoundAnswer",
    "RoundLease",
    "RoundPage",
    "RunAnswer",
    "RunPage",
    "RunRowAnswer",
    "RunView",
    "SessionAnswer",
    "SettingsAnswer",
    "Span",
    "Why",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiErrorBody:
    """What went wrong: a short stable word, and a sentence for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiError:
    """An error."""

    error: ApiErrorBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """It is done."""

    ok: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAnswer:
    """A browser that is signed in; `csrf` goes into the header X-Fedfit-CSRF of everything that changes something."""

    name: str
    role: str
    csrf: str
    expires_in_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Why a device does not work: a code, what happened, and what to do about it."""

    code: str
    text: str
    mend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """A device in a line. `state`: train, evaluate, upload, fetch, start, wait, done, idle, offline, rests, failed."""

    name: str
    state: str
    phase: str
    step: int
    total: int
    loss: float | None
    seen_s: float | None  # None: not since the coordinator was started
    labels: Mapping[str, str]
    plan: str
    budget_bytes: int | None
    predicted_bytes: int | None
    peak_bytes: int | None
    accelerator: str
    accuracy: float | None
    why: Why | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePage:
    """Some of the devices; `next` is the `after` of the next page, `total` how many match, `all` how many there are."""

    items: tuple[DeviceRow, ...]
    next: int | None
    total: int
    all: int
    labels: tuple[str, ...]  # KEY=VALUE that devices have, the most frequent first; at most 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A version of the model on the devices' test data; p10 and p90 bound the middle 80 % of the devices."""

    version: int
    accuracy: float
    macro_f1: float | None
    loss: float
    p10: float | None
    p90: float | None
    num_devices: int
    score: float | None  # the run's metric
    seconds: float | None  # that the round took


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The results of a run by version."""

    run: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The open run, or the last one."""

    run: str
    state: str
    reason: str
    method: str
    model: str
    metric: str
    target: float | None
    round: int  # under way, or done when it has ended
    rounds: int
    version: int  # the newest model
    phase: str
    waiting: str  # for what; empty if it does not wait
    best_version: int | None
    best_score: float | None
    score: float | None  # of the newest version that has one
    score_version: int | None
    time_left_s: float | None
    round_elapsed_s: float | None
    round_left_s: float | None
    median_round_s: float | None
    bytes_up: int
    bytes_down: int
    classes: tuple[str, ...]
    recall: tuple[float | None, ...]
    recall_version: int | None
    connected: bool
    paused: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAnswer:
    """The devices as counts: by state, and by the peak's share of the budget (40 bins, the last: over)."""

    total: int
    counts: Mapping[str, int]
    histogram: tuple[int, ...]
    num_measured: int
    num_over: int
    nearest: tuple[DeviceRow, ...]  # to their budgets


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A phase of a device's work, in seconds since the round began."""

    name: str
    begins_s: float
    ends_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpans:
    """Where a device's time went in the round; the last span of one at work ends now."""

    name: str
    state: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseArea:
    """How many devices were in each phase at these times of the round."""

    times_s: tuple[float, ...]
    phases: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAnswer:
    """The open round, device by device; of a large fleet the slowest, and an area of all."""

    run: str
    number: int
    elapsed_s: float
    left_s: float | None
    num_devices: int
    num_done: int
    is_complete: bool  # False: only the slowest are listed
    devices: tuple[DeviceSpans, ...]
    area: PhaseArea | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Devices that need somebody, for one reason."""

    code: str
    state: str
    count: int
    devices: tuple[str, ...]  # three of them
    text: str
    mend: str
    since_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """How things stand: everything that the overview shows."""

    federation: str
    version: str
    seq: int  # of the newest event that this answer includes
    run: RunView | None
    curve: Curve | None
    fleet: FleetAnswer
    round: RoundAnswer | None
    alerts: tuple[Alert, ...]
    devices: tuple[DeviceRow, ...]  # the first 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRowAnswer:
    """A run in a line."""

    run: str
    state: str
    reason: str
    round: int
    rounds: int
    method: str
    model: str
    metric: str
    best_version: int | None
    best_score: float | None
    created_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """Runs, newest first."""

    items: tuple[RunRowAnswer, ...]
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLease:
    """An assignment of a round."""

    device: str
    state: str
    code: str
    detail: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPage:
    """The assignments of a round's newest attempt."""

    run: str
    number: int
    attempt: int
    state: str
    items: tuple[RoundLease, ...]
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFailureAnswer:
    """An assignment that brought nothing; `log` where the device's owner shares it."""

    run: str
    round: int
    state: str
    code: str
    detail: str
    log: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAnswer:
    """A run: how it stands, its file, what failed."""

    view: RunView
    curve: tuple[CurvePoint, ...]
    file: Mapping[str, Any]
    created_s: int
    num_models: int
    failures: tuple[DeviceFailureAnswer, ...]
    failed_devices: tuple[str, ...]  # of `failures`, in the same order


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAnswer:
    """A device: its line, its profile, its last failures, and where its time went in the open round."""

    row: DeviceRow
    client: str
    kind: str
    samples: int
    failures: tuple[DeviceFailureAnswer, ...]
    spans: tuple[Span, ...]
    round_elapsed_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRound:
    """A device's update of a round."""

    round: int
    predicted_bytes: int
    peak_bytes: int
    budget_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRounds:
    """A device's updates in a run, newest first."""

    run: str
    device: str
    items: tuple[DeviceRound, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run with its curve and its totals."""

    row: RunRowAnswer
    points: tuple[CurvePoint, ...]
    bytes_up: int
    bytes_down: int
    highest_share: float | None  # of a budget
    highest_peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareAnswer:
    """Runs side by side."""

    runs: tuple[ComparedRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLineAnswer:
    """A log line; `age_s` is None for lines that a device sent with a failure."""

    number: int
    age_s: float | None
    level: str
    device: str
    run: str
    round: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Log lines of the coordinator, newest first, or those that devices shared with their failures."""

    items: tuple[LogLineAnswer, ...]
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionLine:
    """Something that somebody did on the page."""

    age_s: float
    name: str
    action: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsAnswer:
    """Who may look, who looks, what was done, and where the coordinator is."""

    tokens: tuple[Mapping[str, Any], ...]
    actions: tuple[ActionLine, ...]
    viewers: int
    addresses: tuple[str, ...]
    brokers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run that was started or queued."""

    run: str
    waits_for: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """Something that takes a while: its state (running, done, failed) and the last lines that it printed."""

    id: str
    kind: str
    run: str
    state: str
    lines: tuple[str, ...]
    file: str  # what can be downloaded at jobs/ID/file; empty if there is nothing
