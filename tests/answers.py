"""Answers of a coordinator with usual values, of which a test names those that it is about."""

from __future__ import annotations

from typing import Any

from rows import run_file

from coordinator.control_messages import DeviceDetails, DeviceLine
from coordinator.run_details import (
    DeviceEvaluation,
    FailedLease,
    RoundAttempt,
    RunDetails,
    RunDevice,
    RunLine,
    VersionResult,
)

_RUN: dict[str, Any] = {
    "run": "r-1",
    "state": "running",
    "reason": "",
    "round": 1,
    "rounds": 3,
    "method": "fedavg",
    "model": "mlp",
    "metric": "accuracy",
    "best_version": None,
    "best_score": None,
    "waits_for": None,
}
_DEVICE: dict[str, Any] = {
    "id": "jetson-1",
    "online": True,
    "seen_s_ago": 3.2,
    "client": "0.1",
    "client_is": "same",
    "plan": "full, microbatch 32",
    "budget_bytes": 1_500_000_000,
    "labels": {},
    "state": "working",
    "phase": "train",
    "step": 3,
    "total": 8,
    "loss": None,
}


def run_line(**changes: Any) -> RunLine:
    """A run in round 1 of 3."""
    return RunLine(**_RUN | changes)


def run_details(**changes: Any) -> RunDetails:
    """The same run, of which nothing else is known."""
    facts: dict[str, Any] = {"dry": False, "file": run_file(), "environment": {}, "created_s": 0, "models": ()}
    facts |= {"num_models": 0, "payload_bytes": None, "evaluations": (), "num_evaluations": 0}
    facts |= {"device_evaluations": (), "round_rows": (), "moved_by_round": (), "leases": (), "failures": ()}
    facts |= {"left_out": (), "devices": (), "barred": (), "progress": None}
    return RunDetails(**_RUN | facts | changes)


def version_result(version: int = 1, **changes: Any) -> VersionResult:
    """A version that two devices judged."""
    facts: dict[str, Any] = {"num_devices": 2, "num_samples": 20, "accuracy": 0.75, "loss": 0.5}
    facts |= {"balanced_accuracy": 0.7, "macro_f1": 0.71, "recall": (0.625, None), "per_architecture": {}}
    return VersionResult(version=version, **facts | changes)


def device_evaluation(**changes: Any) -> DeviceEvaluation:
    """Version 1 on the test data of a."""
    facts: dict[str, Any] = {"version": 1, "device": "a", "slice": "full", "num_samples": 10, "accuracy": 0.75}
    return DeviceEvaluation(**facts | changes)


def run_device(**changes: Any) -> RunDevice:
    """What a planned and used in round 1."""
    facts: dict[str, Any] = {"id": "a", "peak_bytes": 2 * 10**8, "predicted_bytes": 10**8, "budget_bytes": 10**9}
    facts |= {"inside_budget": True, "replans": 3, "plan": "full, microbatch 8", "plan_details": None}
    facts |= {"base_bytes": 0, "num_samples": 10, "num_test": 3, "versions": {}, "round": 1}
    return RunDevice(**facts | {"bytes_up": 1000, "bytes_down": 2000} | changes)


def failed_lease(**changes: Any) -> FailedLease:
    """b declined in round 1."""
    facts: dict[str, Any] = {"device": "b", "round": 1, "attempt": 1, "state": "declined", "code": "crashed"}
    return FailedLease(**facts | {"detail": "", "log": ()} | changes)


def abandoned_round(**changes: Any) -> RoundAttempt:
    """Round 1 was abandoned."""
    facts: dict[str, Any] = {"run": "r-1", "number": 1, "attempt": 1, "state": "ABANDONED", "goal": 2, "quorum": 2}
    facts |= {"remaining_s": 0.0, "extended": False, "reason": "", "elapsed_s": 0.0}
    return RoundAttempt(**facts | {"bytes_up": None, "bytes_down": None, "num_available": 2} | changes)


def device_line(**changes: Any) -> DeviceLine:
    """A device that trains."""
    return DeviceLine(**_DEVICE | changes)


def device_details(**changes: Any) -> DeviceDetails:
    """The same device, of which nothing else is known."""
    facts: dict[str, Any] = {"labels_given": {}, "labels_own": {}, "profile": None, "free_bytes": None, "tasks": {}}
    return DeviceDetails(**_DEVICE | facts | {"brokers": (), "deployed": None, "failures": ()} | changes)
