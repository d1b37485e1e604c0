"""The update that an assignment ends with: its report, its tensors, and the manifest that completes it.

The manifest is written last: where there is one, everything else is there.
Covers: what goes into `update.bin` and `update.json`. Does not cover: what may leave of knowledge
(`knowledge_release`), the method's state (`method_state`).
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from edge_client import durable, faults
from edge_client.knowledge.kinds import named_tensors
from edge_client.knowledge.schema import HELD_BACK
from edge_client.methods.coverage import missing_tensors
from edge_client.models.contract import Model
from edge_client.records import Evaluation, PlanRules, Report, TrainingPlan, to_map
from edge_client.training.evaluate import Result
from edge_client.wire.container import CONFUSION, EXTRA_PREFIX, MODEL_PREFIX, payload_kind, read_header
from edge_client.wire.tensors import ContainerReader, codec_for, write_container
from edge_client.worker.allowance import Measured
from edge_client.worker.device_data import DeviceData
from edge_client.worker.local_training import LocalTraining

__all__ = ["Manifest", "Results", "make_report", "update_tensors", "write_manifest", "write_update"]

_FILE_STEP_BYTES = 64 * 2**20
_MAX_BYTES = 2**53  # of a `Count`
_NO_WEIGHTS = "none"  # as the payload of an update


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What an assignment has brought; a dry run has a plan alone."""

    plan: TrainingPlan  # in force at the end: memory may have become less meanwhile
    num_replans: int = 0
    evaluation: Result | None = None
    training: LocalTraining = field(default_factory=LocalTraining)
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # the method's tensors, as they were received


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What `update.json` says of `update.bin`."""

    sha256: str
    length: int
    num_samples: int


def make_report(
    results: Results,
    data: DeviceData,
    *,
    codec: str,
    memory: Measured,
    seconds: float,
    phases: Mapping[str, float] | None = None,
    accelerator: tuple[int, int] = (0, 0),
) -> Report:
    """What the coordinator is told beside the tensors; `accelerator` is the peak and the base of its memory."""
    trained = results.training.trained
    scalars = dict(results.training.outcome.scalars)
    if trained is not None and math.isfinite(trained.mean_loss):
        scalars["loss"] = trained.mean_loss
    if trained is not None:
        scalars["replans"] = float(results.num_replans)
    return Report(
        num_samples=len(data.train) if trained is not None else 0,
        num_held=len(data.train),
        num_test=len(data.test),
        steps=trained.steps if trained is not None else 0,
        payload=payload_kind(codec) if trained is not None else _NO_WEIGHTS,
        plan=_with_file_pages(results.plan, memory),
        peak_bytes=memory.peak_rss_bytes,
        base_bytes=memory.base_bytes + memory.file_bytes,
        private_peak_bytes=memory.peak_bytes,
        private_base_bytes=memory.base_bytes,
        accelerator_peak_bytes=accelerator[0],
        accelerator_base_bytes=accelerator[1],
        seconds=round(seconds, 3),
        scalars=scalars,
        versions={"python": platform.python_version(), "torch": str(torch.__version__)[:64]},
        evaluation=_evaluation(results.evaluation),
        phases=phases,
    )


def _with_file_pages(plan: TrainingPlan, memory: Measured) -> TrainingPlan:
    """As it is told: older coordinators compare its budget with the highest RSS, which has the pages of files.

    In large steps, because they differ a little each time and a plan must not.
    """
    file_bytes = max(memory.file_bytes, memory.peak_rss_bytes - memory.peak_bytes)
    file_bytes = -(-file_bytes // _FILE_STEP_BYTES) * _FILE_STEP_BYTES
    return replace(
        plan,
        budget_bytes=min(plan.budget_bytes + file_bytes, _MAX_BYTES),  # a simulation without budgets has the largest
        predicted_bytes=min(plan.predicted_bytes + file_bytes, _MAX_BYTES),
        private_budget_bytes=plan.budget_bytes,
        private_predicted_bytes=plan.predicted_bytes,
    )


def _evaluation(result: Result | None) -> Evaluation | None:
    if result is None:
        return None
    return Evaluation(num_samples=result.num_samples, num_correct=result.num_correct, loss_sum=result.finite_loss_sum)


def update_tensors(results: Results, model: Model, rules: PlanRules, model_file: Path) -> list[tuple[str, Tensor]]:
    """The tensors of an update that was trained: of the model and the method, then knowledge.

    Those that the plan did not train and those that stay on the device are left out. The method's own tensors, which
    came with the model in `model_file`, go back as they came if it did not change them.
    """
    outcome, state, extra = results.training.outcome, model.state_dict(), results.extra
    names = [MODEL_PREFIX + name for name in state] + [EXTRA_PREFIX + name for name in extra]
    absent = missing_tensors(names, results.plan, rules, read_header(model_file).meta)
    values = {MODEL_PREFIX + name: tensor for name, tensor in state.items()}
    values |= {EXTRA_PREFIX + name: tensor for name, tensor in outcome.extra.items()}
    tensors = [
        (name, values[name] if name in values else extra[name.removeprefix(EXTRA_PREFIX)])
        for name in names
        if name not in absent
    ]
    return [*tensors, *named_tensors(outcome.knowledge)]


def write_update(
    workdir: Path,
    report: Report,
    tensors: Sequence[tuple[str, Tensor]],
    *,
    codec: str,
    confusion: Tensor | None = None,
    withheld: Sequence[str] = (),
    model_file: Path | None = None,
) -> Manifest:
    """Write `update.bin`; with a lossy codec, its weights are differences from those in `model_file`."""
    entries = list(tensors)
    table = [(name, codec_for(tensor, codec), tuple(tensor.shape)) for name, tensor in entries]
    if confusion is not None:
        entries.append((CONFUSION, confusion))
        table.append((CONFUSION, "i64", tuple(confusion.shape)))
    meta = to_map(report) | ({HELD_BACK: "; ".join(withheld)} if withheld else {})
    temporary = workdir / ".update.bin.tmp"
    faults.point("worker.update.write")
    if report.payload == "delta" and model_file is not None:
        with ContainerReader(model_file) as reader:
            names = set(reader.names())
            values = (tensor.cpu() - reader.tensor(name) if name in names else tensor for name, tensor in entries)
            sha256, length = write_container(temporary, meta, table, values)
    else:
        sha256, length = write_container(temporary, meta, table, (tensor for _, tensor in entries))
    durable.publish(temporary, workdir / "update.bin", point="worker.update")
    return Manifest(sha256=sha256, length=length, num_samples=report.num_samples)


def write_manifest(workdir: Path, manifest: Manifest) -> None:
    """Complete the update."""
    durable.write_bytes(workdir / "update.json", json.dumps(to_map(manifest)).encode(), point="worker.manifest")
