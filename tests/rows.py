"""Run files, rows and assignments for tests: valid, small, and changed by keyword."""

from __future__ import annotations

import hashlib
from typing import Any

from coordinator.rounds.slice_choice import SliceChoice
from coordinator.store.rows import (
    DeploymentRow,
    DeviceRow,
    EvaluationRow,
    LeaseRow,
    LeftOutRow,
    ModelRow,
    PartRow,
    RoundRow,
    RunRow,
    UpdateRow,
)
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.records import DeviceProfile, PartRef, Report, TrainingPlan, to_map
from edge_client.wire.messages import Assign

PROFILE = DeviceProfile(budget_bytes=10**9)
PLAN = TrainingPlan(microbatch=8, budget_bytes=10**9, predicted_bytes=10**8)


def digest(text: str) -> str:
    """A hash that tells where it came from."""
    return hashlib.sha256(text.encode()).hexdigest()


def run_file(**tables: Any) -> RunFile:
    """A run of two classes; `devices={"min": 2}` and the like change it."""
    base: dict[str, Any] = {"name": "r", "model": {"name": "mlp", "input": [1, 2, 2]}, "classes": ["no", "yes"]}
    merged = {key: value for key, value in (base | tables).items() if value is not None}
    return parse_table(RunFile, merged, source="run.toml")


def slice_choice(file: RunFile, budget_bytes: int | None = None) -> SliceChoice:
    """Devices without labels, all with the same memory for training; nothing was measured."""
    return SliceChoice(file, {}, budget_of=lambda _: budget_bytes, labels_of=lambda _: {}, of_training=True)


def run_row(run: str = "r-1", file: RunFile | None = None, **changes: Any) -> RunRow:
    """A run as the store keeps it."""
    return RunRow(id=run, file=to_map(file or run_file()), **changes)


def device_row(name: str, **changes: Any) -> DeviceRow:
    """An enrolled device whose key follows from its name."""
    return DeviceRow(**{"name": name, "key": digest(name), "password": f"password-of-{name}"} | changes)


def model_row(version: int, run: str = "r-1", **changes: Any) -> ModelRow:
    """A version whose hash follows from its number."""
    sha256 = digest(f"{run} model {version}")
    fields: dict[str, Any] = {"run": run, "version": version, "sha256": sha256, "length": 100}
    return ModelRow(**fields | {"sent_sha256": sha256, "sent_length": 100} | changes)


def part_row(version: int, cut: str = "width:1/2", run: str = "r-1") -> PartRow:
    """A slice of a version."""
    return PartRow(run=run, version=version, slice=cut, sha256=digest(f"{run} {version} {cut}"), length=50)


def left_out_row(device: str = "a", code: str = "silent", round: int = 1, run: str = "r-1", **more: Any) -> LeftOutRow:
    """A device of which something is missing."""
    fields: dict[str, Any] = {"run": run, "device": device, "code": code, "round": round, "detail": "why"}
    return LeftOutRow(**fields | more)


def round_row(number: int = 1, attempt: int = 1, run: str = "r-1", **changes: Any) -> RoundRow:
    """An attempt that wants two updates."""
    fields: dict[str, Any] = {"run": run, "number": number, "attempt": attempt, "goal": 2, "quorum": 2}
    return RoundRow(**fields | {"remaining_s": 60.0} | changes)


def lease_row(issue: int, device: str = "a", **changes: Any) -> LeaseRow:
    """A lease to train and evaluate in round 1."""
    fields: dict[str, Any] = {"id": f"lease-{issue}", "issue": issue, "epoch": 7, "run": "r-1", "round": 1}
    fields |= {"attempt": 1, "device": device, "train": True, "evaluate": True, "version": 0}
    return LeaseRow(**fields | changes)


def report(**changes: Any) -> Report:
    """What a worker says of ten samples."""
    fields: dict[str, Any] = {"num_samples": 10, "steps": 2, "payload": "params", "plan": PLAN}
    return Report(**fields | changes)


def update_row(device: str = "a", lease: str = "lease-1", **changes: Any) -> UpdateRow:
    """A stored update of round 1."""
    fields: dict[str, Any] = {"run": "r-1", "round": 1, "attempt": 1, "device": device, "lease": lease}
    fields |= {"sha256": digest(f"update {device} {lease}"), "length": 50, "num_samples": 10, "norm": 1.5}
    return UpdateRow(**fields | {"report": report()} | changes)


def evaluation_row(device: str = "a", version: int = 0, **changes: Any) -> EvaluationRow:
    """Seven of ten right."""
    fields: dict[str, Any] = {"run": "r-1", "version": version, "device": device, "num_samples": 10, "num_correct": 7}
    return EvaluationRow(**fields | {"loss_sum": 3.5, "confusion": (4, 1, 2, 3)} | changes)


def deployment_row(issue: int = 1, device: str = "a", **changes: Any) -> DeploymentRow:
    """The third version of a run for a device; its file's hash follows from the issue."""
    fields: dict[str, Any] = {"id": f"deployment-{issue}", "issue": issue, "device": device, "run": "r-1", "version": 3}
    fields |= {"architecture": "full", "precision": "fp32", "sha256": digest(f"onnx {issue}"), "length": 70}
    return DeploymentRow(**fields | {"input": (1, 2, 2), "classes_sha256": digest("classes")} | changes)


def assign(issue: int = 1, **changes: Any) -> Assign:
    """Work in two parts."""
    parts = (
        PartRef(key="run", sha256=digest("settings"), length=10),
        PartRef(key="model", sha256=digest("model"), length=20),
    )
    fields: dict[str, Any] = {"lease": f"lease-{issue}", "epoch": 1, "issue": issue, "run": "r-1", "round": 1}
    fields |= {"num_rounds": 3, "version": 0, "train": True, "evaluate": True, "seed": 5, "learning_rate": 0.1}
    return Assign(**fields | {"deadline_s": 60.0, "parts": parts} | changes)
