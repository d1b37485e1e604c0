"""The record of one run, for comparisons and reports, whether a fleet or a simulation trained it.

Covers: the record, and how a coordinator's answer to `run-show` fills it.
Does not cover: a simulation's folder, which fills it in `coordinator.results.run_folders`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator import control
from coordinator.control_messages import ShowRun, ShowTimeline
from coordinator.results.similarity_record import Similarity
from coordinator.run_details import RunDetails, RunDevice
from coordinator.timeline import RoundTimeline
from edge_client.config.run_file import RunFile
from edge_client.records import from_map

__all__ = [
    "METRICS",
    "DeviceRecord",
    "FailureRecord",
    "LeftOutRecord",
    "RoundRecord",
    "RunRecord",
    "fetch_record",
    "from_answer",
    "is_better",
]

Json = Mapping[str, Any]

# as run files name them -> the field of a round
METRICS = {"accuracy": "accuracy", "balanced-accuracy": "balanced_accuracy", "macro-f1": "macro_f1", "loss": "loss"}
_NEWEST = 1000  # rounds to request
_NEWEST_TIMELINES = 5  # of them, with all times


def is_better(metric: str, value: float, than: float) -> bool:
    """A loss is better when it is lower, everything else when it is higher."""
    return value < than if metric == "loss" else value > than


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """A round and its model; number 0 is the model before the first round."""

    number: int
    accuracy: float | None = None  # None: not judged
    balanced_accuracy: float | None = None
    macro_f1: float | None = None
    loss: float | None = None
    num_samples: int | None = None  # that it was judged on
    num_devices: int | None = None  # that judged it
    recall: tuple[float | None, ...] = ()  # per class; None for a class that nobody has
    per_architecture: Mapping[str, float] = field(default_factory=dict)  # accuracy
    per_device: Mapping[str, float] = field(default_factory=dict)  # accuracy on each device's own test data
    bytes_up: int | None = None  # in this round
    bytes_down: int | None = None
    num_updates: int | None = None  # that its model was made of
    seconds: float | None = None

    def value(self, metric: str) -> float | None:
        """The value of a metric, by its name in a run file; None if the model was not evaluated."""
        value: float | None = getattr(self, METRICS[metric])
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """A device over all rounds; its memory is the whole worker's, or what training adds to it (`RunRecord`)."""

    name: str
    plan: str = ""  # the newest
    failure: str = ""  # the reason code of one that never trained
    budget_bytes: int | None = None  # these three are of the round in which it came nearest to its budget
    predicted_bytes: int | None = None
    peak_bytes: int | None = None
    inside_budget: bool = True
    replans: int | None = None
    num_rounds: int | None = None  # that it trained in
    num_samples: int | None = None
    num_test: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    machine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """An assignment or a round that failed."""

    device: str
    round: int
    state: str = ""
    code: str = ""
    detail: str = ""
    log: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutRecord:
    """Knowledge that the run could not use, of a device or of all (`device` is empty)."""

    device: str = ""
    round: int  # the newest in which it was so
    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run, so far."""

    name: str
    file: RunFile
    state: str = ""
    reason: str = ""
    num_rounds: int = 0  # completed
    best: int | None = None  # the version with the best value of the run's metric
    created_s: int = 0
    rounds: Sequence[RoundRecord] = ()  # the known ones, by number
    devices: Sequence[DeviceRecord] = ()
    failures: Sequence[FailureRecord] = ()
    left_out: Sequence[LeftOutRecord] = ()
    environment: Json = field(default_factory=dict)
    model_sha256: str = ""
    whole_model_bytes: int | None = None  # of the model that FedAvg would send, one way
    similarity: Similarity = field(default_factory=Similarity)
    memory_of: str = "a worker"  # what budgets, predictions and peaks are of: a worker | training
    folder: Path | None = None  # of a simulation
    timeline: Sequence[RoundTimeline] = ()  # of a fleet's newest rounds

    @property
    def judged(self) -> list[RoundRecord]:
        """The rounds whose model was evaluated."""
        return [record for record in self.rounds if record.accuracy is not None]

    @property
    def moved_bytes(self) -> int:
        """Bytes moved by all devices, both ways.

        Devices that only declined count in the rounds alone, and of a long run not all rounds are known.
        """
        of_devices = sum((device.bytes_up or 0) + (device.bytes_down or 0) for device in self.devices)
        return max(of_devices, self.counted_bytes)

    @property
    def counted_bytes(self) -> int:
        """Bytes moved in the known rounds, both ways."""
        return sum((record.bytes_up or 0) + (record.bytes_down or 0) for record in self.rounds)

    @property
    def fedavg_bytes(self) -> int | None:
        """Bytes that FedAvg of the whole model would have moved with the same devices and rounds, both ways."""
        trained = [record.num_updates for record in self.rounds if record.num_updates is not None]
        known = self.whole_model_bytes is not None and trained
        return 2 * sum(trained) * (self.whole_model_bytes or 0) if known else None


def fetch_record(state_dir: Path, run: str) -> RunRecord:
    """The record of a run, requested from the coordinator that runs on a state directory."""
    record = from_answer(control.ask(state_dir, ShowRun(run=run, newest=_NEWEST, report=True)))
    timeline = control.ask(state_dir, ShowTimeline(run=record.name, newest=_NEWEST_TIMELINES))
    return replace(record, timeline=timeline.rounds)


def from_answer(details: RunDetails) -> RunRecord:
    """The record of a coordinator's run."""
    return RunRecord(
        name=details.run,
        file=details.file,
        state=details.state,
        reason=details.reason,
        num_rounds=details.round,
        best=details.best_version,
        created_s=details.created_s,
        rounds=_rounds(details),
        devices=[_device(device) for device in details.devices],
        failures=list(_failures(details)),
        left_out=[
            LeftOutRecord(device=row.device or "", round=row.round, code=row.code, detail=row.detail)
            for row in details.left_out
        ],
        environment=details.environment,
        model_sha256=details.models[-1].sha256 if details.models else "",
        whole_model_bytes=details.whole_model_bytes,
        similarity=from_map(Similarity, details.similarity or {}),
    )


def _rounds(details: RunDetails) -> list[RoundRecord]:
    """The rounds that were evaluated, and those that moved bytes."""
    per_device: dict[int, dict[str, float]] = {}
    for row in details.device_evaluations:
        if row.accuracy is not None and details.file.evaluate.on == "devices":
            per_device.setdefault(row.version, {})[row.device] = row.accuracy
    rounds = {
        result.version: RoundRecord(
            number=result.version,
            accuracy=result.accuracy,
            balanced_accuracy=result.balanced_accuracy,
            macro_f1=result.macro_f1,
            loss=result.loss,
            num_samples=result.num_samples,
            num_devices=result.num_devices,
            recall=result.recall,
            per_architecture=result.per_architecture,
            per_device=per_device.get(result.version, {}),
        )
        for result in details.evaluations
    }
    num_updates = {row.round: row.num_updates for row in details.updates_by_round or ()}
    for moved in details.moved_by_round:
        rounds[moved.round] = replace(
            rounds.get(moved.round, RoundRecord(number=moved.round)),
            bytes_up=moved.bytes_up,
            bytes_down=moved.bytes_down,
            num_updates=num_updates.get(moved.round, 0),
        )
    return [rounds[number] for number in sorted(rounds)]


def _device(device: RunDevice) -> DeviceRecord:
    profile = device.profile
    machine = [profile.machine or profile.kind] if profile is not None else []
    machine += [f"{name} {version}" for name, version in device.versions.items()]
    return DeviceRecord(
        name=device.id,
        budget_bytes=device.budget_bytes or None,
        plan=device.plan,
        predicted_bytes=device.predicted_bytes or None,
        peak_bytes=device.peak_bytes or None,
        inside_budget=device.inside_budget,
        replans=device.replans,
        num_samples=device.num_samples,
        num_test=device.num_test,
        bytes_up=device.bytes_up,
        bytes_down=device.bytes_down,
        machine=", ".join(filter(None, machine)),
    )


def _failures(details: RunDetails) -> Iterator[FailureRecord]:
    for lease in details.failures:
        yield FailureRecord(
            device=lease.device,
            round=lease.round,
            state=lease.state,
            code=lease.code,
            detail=lease.detail,
            log=lease.log,
        )
    for row in details.round_rows:
        if row.state == "ABANDONED":
            state = f"abandoned, try {row.attempt}"
            yield FailureRecord(device="all", round=row.number, state=state, detail=row.reason)
