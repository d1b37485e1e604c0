"""The self-test of a deployed model, in a process of its own: `python -m edge_client.onnx.self_test JOB RESULT`.

Loads the file with onnxruntime, compares its metadata with the announcement, and its outputs for known samples with
those at the export; all inside the device's memory budget. Without torch.
Covers: the test. Does not cover: when it runs and what follows from it (`deploying`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from edge_client.config.quantities import format_bytes
from edge_client.device import guard, meter
from edge_client.errors import InputError, MachineError
from edge_client.measuring import exit_codes, subprocess_call
from edge_client.onnx.file import Facts, OnnxModel, classes_hash, runtime
from edge_client.records import Count, Text
from edge_client.wire.messages import Deploy

__all__ = ["Job", "NoRuntimeError", "Passed", "main", "run"]


class NoRuntimeError(MachineError):
    """This device cannot use ONNX files at all."""

    exit_code = exit_codes.NO_RUNTIME


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to test."""

    file: Text
    deploy: Deploy
    budget_bytes: Count  # of this whole process


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What was measured."""

    difference: float | None  # None: the file has no recorded outputs
    peak_bytes: Count


def run(job: Job) -> Passed:
    """Raises `InputError` if it is not the model that was announced, `MemoryError` if it needs too much."""
    try:
        runtime()
    except MachineError as error:
        raise NoRuntimeError(str(error)) from error
    room = job.budget_bytes - meter.rss_bytes()
    if room < 0:
        raise MemoryError(_too_much(job.budget_bytes))
    guard.limit_growth(room)
    try:
        model = OnnxModel(Path(job.file))
        _compare(model.facts, model.input_shape, job.deploy)
        difference = _difference(model, job.deploy.precision)
    except InputError as error:
        if _is_out_of_memory(error):
            raise MemoryError(_too_much(job.budget_bytes)) from error
        raise
    guard.lift_limit()
    if meter.peak_rss_bytes() > job.budget_bytes:
        raise MemoryError(_too_much(job.budget_bytes))
    return Passed(difference=difference, peak_bytes=meter.peak_rss_bytes())


def _compare(facts: Facts, shape: tuple[int, ...], deploy: Deploy) -> None:
    """Compare the file's metadata with the coordinator's announcement."""
    pairs = (
        ("run", facts.run, deploy.run),
        ("version", facts.version, deploy.version),
        ("architecture", facts.architecture, deploy.architecture),
        ("precision", facts.precision, deploy.precision),
        ("input", shape, deploy.input),
        ("classes", classes_hash(facts.classes), deploy.classes_sha256),
    )
    for name, actual, announced in pairs:
        if actual != announced:
            raise InputError(f"the file has another {name} than was announced: {actual!r} instead of {announced!r}")


def _difference(model: OnnxModel, precision: str) -> float | None:
    from edge_client.onnx import test_samples  # loads numpy, as onnxruntime has by now

    gap = test_samples.difference(model)
    if gap is None:
        return None
    if not gap <= test_samples.LIMITS[precision]:  # also if it is not a number
        raise InputError(
            f"it does not say to known samples what it said when it was made: the outputs differ by {gap:.3g} of the "
            f"largest one, at most {test_samples.LIMITS[precision]:g} is accepted"
        )
    return gap


def _is_out_of_memory(error: InputError) -> bool:
    """onnxruntime has no exception of its own for it."""
    return any(word in str(error).lower() for word in ("bad alloc", "bad_alloc", "failed to allocate"))


def _too_much(budget: int) -> str:
    return f"a process that uses it needs more than this device's budget of {format_bytes(budget)}"


def main(arguments: list[str]) -> int:
    """Answer the job; returns the exit code."""
    return subprocess_call.serve(Job, run, arguments)


if __name__ == "__main__":
    guard.end(main(sys.argv[1:]))
