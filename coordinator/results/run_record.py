"""The record of one run, for comparisons and reports, whether a fleet or a simulation trained it.

Covers: the record, and how a coordinator's answer to `run-show` fills it.
Does not cover: a simulation's folder, which fills it in `coordinator.results.run_folders`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator import control
from coordinator.results.similarity_record import Similarity
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
_EVALUATED = ("accuracy", "balanced_accuracy", "macro_f1", "loss", "num_samples", "num_devices")


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
    return from_answer(control.request(state_dir, "run-show", run=run, newest=_NEWEST, report=True))


def from_answer(show: Json) -> RunRecord:
    """The record of a coordinator's run; `show` is the answer to `run-show`."""
    models = show.get("models") or []
    return RunRecord(
        name=show["run"],
        file=from_map(RunFile, show["file"]),
        state=show["state"],
        reason=show.get("reason") or "",
        num_rounds=int(show.get("round") or 0),
        best=show.get("best_version"),
        created_s=show.get("created_s") or 0,
        rounds=_rounds(show),
        devices=[_device(entry) for entry in show.get("devices") or []],
        failures=list(_failures(show)),
        left_out=[LeftOutRecord(**{**row, "device": row["device"] or ""}) for row in show.get("left_out") or []],
        environment=show.get("environment") or {},
        model_sha256=models[-1]["sha256"] if models else "",
        whole_model_bytes=show.get("whole_model_bytes"),
        similarity=from_map(Similarity, show.get("similarity") or {}),
    )


def _rounds(show: Json) -> list[RoundRecord]:
    """The rounds that were evaluated, and those that moved bytes."""
    accuracies: dict[int, dict[str, float]] = {}
    for row in show.get("device_evaluations") or []:
        if row["accuracy"] is not None and show["file"]["evaluate"]["on"] == "devices":
            accuracies.setdefault(row["version"], {})[row["device"]] = row["accuracy"]
    fields: dict[int, dict[str, Any]] = {}
    for row in show.get("evaluations") or []:
        values = {name: row[name] for name in _EVALUATED}
        values |= {"recall": tuple(row["recall"]), "per_architecture": row["per_architecture"]}
        fields[row["version"]] = {**values, "per_device": accuracies.get(row["version"], {})}
    num_updates = {row["round"]: row["num_updates"] for row in show.get("updates_by_round") or []}
    for row in show.get("moved_by_round") or []:
        moved = {"bytes_up": row["bytes_up"], "bytes_down": row["bytes_down"]}
        fields[row["round"]] = fields.get(row["round"], {}) | moved | {"num_updates": num_updates.get(row["round"], 0)}
    return [RoundRecord(number=number, **fields[number]) for number in sorted(fields)]


def _device(entry: Json) -> DeviceRecord:
    profile = entry.get("profile") or {}
    machine = [profile.get("machine") or profile.get("kind") or ""]
    machine += [f"{name} {version}" for name, version in (entry.get("versions") or {}).items()]
    return DeviceRecord(
        name=entry["id"],
        budget_bytes=entry["budget_bytes"] or None,
        plan=entry["plan"],
        predicted_bytes=entry["predicted_bytes"] or None,
        peak_bytes=entry["peak_bytes"] or None,
        inside_budget=entry["inside_budget"],
        replans=entry["replans"],
        num_samples=entry["num_samples"],
        num_test=entry["num_test"],
        bytes_up=entry["bytes_up"],
        bytes_down=entry["bytes_down"],
        machine=", ".join(filter(None, machine)),
    )


def _failures(show: Json) -> Iterator[FailureRecord]:
    names = ("device", "round", "state", "code", "detail", "log")
    for failure in show.get("failures") or []:
        yield FailureRecord(**{name: failure[name] for name in names})
    for row in show.get("round_rows") or []:
        if row["state"] == "ABANDONED":
            state = f"abandoned, try {row['attempt']}"
            yield FailureRecord(device="all", round=row["number"], state=state, detail=row["reason"])
