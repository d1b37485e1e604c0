"""The first gate for an update: its table and its report against what the device was asked for, without torch.

Covers: names (those that method and plan send back), order, shapes, codecs, payload kind, counts of samples and steps,
knowledge, the evaluation and its matrix.
Does not cover: the values (`coordinator/aggregation/check.py`), who sent it (frames), whether it is
late (rounds).

Every refusal is a `PayloadError` with one of the codes names, shape, dtype, plan, sample_count, evaluation, or those of
the container and of `records`; its detail names device, round, what was expected and what came.
"""

from __future__ import annotations

import array
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge_client import records
from edge_client.data.input_sums import MEAN, check_sums
from edge_client.errors import PayloadError
from edge_client.knowledge.schema import KNOWLEDGE_PREFIX, Limits, check_entries
from edge_client.methods import coverage
from edge_client.methods.base import PlanRules
from edge_client.methods.slices import architecture
from edge_client.records import MATRIX_CLASSES, Report
from edge_client.wire import frames
from edge_client.wire.container import (
    CONFUSION,
    EXTRA_PREFIX,
    MODEL_PREFIX,
    Entry,
    Header,
    codec_rule,
    payload_kind,
    read_header,
)

__all__ = ["CONFUSION", "Expected", "check_header", "read_confusion"]

_MAX_LISTED = 3
_MAX_PLAN_BYTES = 12_288
_MAX_PHASES = 64  # passes of a method over the data, in each epoch
_MAX_VERSIONS = 16
_TRAINED = (MODEL_PREFIX, EXTRA_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a device was asked for, and what it announced."""

    device: str
    round: int
    base: Header  # of the container that was sent: the table that must come back
    codec: str  # of the run
    train: bool
    evaluate: bool  # neither of both: the plan alone, or the sums of its inputs
    sums: bool = False  # the sums
    num_samples: int  # announced with the update
    max_samples: int
    num_classes: int
    epochs: int  # of the run
    rules: PlanRules = field(default_factory=PlanRules)  # of the run's method
    knowledge: Limits | None = None  # what may come beside the model; None: nothing
    slice: str = "full"  # of the model, what the device was sent

    @property
    def source(self) -> str:
        """How errors call the update."""
        return f"update from {self.device!r} for round {self.round}"


def check_header(path: Path, expected: Expected) -> Report:
    """The report of the update at `path`, if it is what was asked for; raises `PayloadError` if not."""
    header = read_header(path)
    report = records.from_map(Report, header.meta, where=f"{expected.source}: report")
    trained = [entry for entry in header.entries if entry.name.startswith(_TRAINED)]
    known = [entry for entry in header.entries if entry.name.startswith(KNOWLEDGE_PREFIX)]
    others = [entry for entry in header.entries if not entry.name.startswith((*_TRAINED, KNOWLEDGE_PREFIX))]
    _check_plan(report, expected)
    _check_tensors(trained, report, expected)
    _check_knowledge(known, expected)
    _check_payload(report, expected)
    _check_samples(report, expected)
    _check_evaluation(others, report, expected)
    _check_sums(report, expected)
    return report


def _check_sums(report: Report, expected: Expected) -> None:
    """A device may keep its sums; one that sends them was asked for them, and for as many as the model has channels."""
    if report.input_sums is None:
        return
    if not expected.sums:
        raise PayloadError("malformed", f"{expected.source} brings sums of its inputs that nobody asked for")
    means = [entry for entry in expected.base.entries if entry.name.endswith(f".{MEAN}")]
    num_channels = means[0].shape[0] if means else 0
    check_sums(report.input_sums, num_channels=num_channels, num_samples=report.num_held, source=expected.source)


def _check_tensors(trained: Sequence[Entry], report: Report, expected: Expected) -> None:
    """Exactly those that were sent, without what the method keeps on the device and the plan leaves untrained."""
    listed = [e for e in expected.base.entries if e.name.startswith(_TRAINED)] if expected.train else []
    lacking = coverage.missing_tensors(
        [entry.name for entry in listed], report.plan, expected.rules, expected.base.meta
    )
    listed = [entry for entry in listed if entry.name not in lacking]
    if [entry.name for entry in trained] != [entry.name for entry in listed]:
        raise PayloadError("names", _name_difference(trained, listed, len(lacking), expected))
    for entry, sent in zip(trained, listed, strict=True):
        if entry.shape != sent.shape:
            raise PayloadError(
                "shape",
                f"{expected.source}: {_short(entry)} has shape {list(entry.shape)}, assignment sent {list(sent.shape)}",
            )
        codec = codec_rule(len(sent.shape), expected.codec, integer=sent.codec == "i64")
        if entry.codec != codec:
            raise PayloadError(
                "dtype",
                f"{expected.source}: {_short(entry)} came as {entry.codec}, "
                f"a run with codec {expected.codec} sends it as {codec}",
            )


def _check_knowledge(known: Sequence[Entry], expected: Expected) -> None:
    """Only tensors that the method uses, each of them whole; a device may send fewer, or none."""
    if known and (expected.knowledge is None or not expected.train):
        why = "nothing was trained" if expected.knowledge is not None else "the run's method takes none"
        names = _some([_short(entry) for entry in known])
        raise PayloadError("names", f"{expected.source} brings knowledge ({names}), and {why}")
    if known and expected.knowledge is not None:
        check_entries(known, expected.knowledge, codec=expected.codec, source=expected.source)


def _name_difference(trained: Sequence[Entry], listed: Sequence[Entry], num_lacking: int, expected: Expected) -> str:
    came, wanted = {entry.name for entry in trained}, {entry.name for entry in listed}
    missing = [_short(entry) for entry in listed if entry.name not in came]
    unknown = [_short(entry) for entry in trained if entry.name not in wanted]
    reasons = [f"{kind}: {_some(names)}" for kind, names in (("missing", missing), ("unknown", unknown)) if names]
    why = "; ".join(reasons) or "the same names in another order"
    without = f" without the {num_lacking} that its method or its plan leaves out" if num_lacking else ""
    return f"{expected.source} has {len(trained)} tensors, assignment listed {len(listed)}{without} ({why})"


def _short(entry: Entry) -> str:
    return repr(entry.name.removeprefix(MODEL_PREFIX)[:80])


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _check_payload(report: Report, expected: Expected) -> None:
    kind = payload_kind(expected.codec) if expected.train else "none"
    if report.payload != kind:
        raise PayloadError(
            "malformed",
            f"{expected.source} says its tensors are {report.payload!r}, "
            f"expected {kind!r} (codec {expected.codec}, {'training' if expected.train else 'evaluation only'})",
        )


def _check_plan(report: Report, expected: Expected) -> None:
    """The size matters because the plan is part of the device's next assignment, which is one message."""
    if report.plan is None and not (expected.train or expected.evaluate or expected.sums):
        raise PayloadError("malformed", f"{expected.source} has no plan, and nothing else was asked for")
    if len(report.versions) > _MAX_VERSIONS:
        raise PayloadError(
            "too_large", f"{expected.source} names {len(report.versions)} versions, at most {_MAX_VERSIONS} are kept"
        )
    plan_bytes = len(frames.pack(records.to_map(report.plan)))
    if plan_bytes > _MAX_PLAN_BYTES:
        raise PayloadError(
            "too_large", f"{expected.source}: its plan has {plan_bytes} bytes, at most {_MAX_PLAN_BYTES} travel"
        )
    problem = coverage.plan_problem(report.plan, expected.rules) if report.plan is not None else ""
    architecture_name = architecture(expected.slice)
    if report.plan is not None and report.plan.slice != architecture_name:
        problem = f"it is for the slice {report.plan.slice!r}, the device was sent {architecture_name!r}"
    if problem:
        raise PayloadError("plan", f"{expected.source}: its plan does not fit the run: {problem}")


def _check_samples(report: Report, expected: Expected) -> None:
    if report.num_samples != expected.num_samples:
        raise PayloadError(
            "sample_count",
            f"{expected.source} was trained on {report.num_samples} samples, announced {expected.num_samples}",
        )
    low, high = (1, expected.max_samples) if expected.train else (0, 0)
    if not low <= report.num_samples <= high:
        raise PayloadError(
            "sample_count", f"{expected.source} claims {report.num_samples} samples, expected {low} to {high}"
        )
    if max(report.num_held, report.num_test) > expected.max_samples:
        raise PayloadError(
            "sample_count",
            f"{expected.source} claims {report.num_held} training and {report.num_test} test samples, "
            f"expected at most {expected.max_samples}",
        )
    most = _MAX_PHASES * expected.epochs * report.num_samples  # a step takes at least one sample
    if report.steps > most:
        raise PayloadError("range", f"{expected.source} claims {report.steps} steps, expected at most {most}")


def _check_evaluation(others: Sequence[Entry], report: Report, expected: Expected) -> None:
    if report.evaluation is not None and not expected.evaluate:
        raise PayloadError("malformed", f"{expected.source} brings an evaluation that nobody asked for")
    wanted = [CONFUSION] if report.evaluation is not None else []
    if [entry.name for entry in others] != wanted:
        names = _some([repr(entry.name[:80]) for entry in others]) or "none"
        raise PayloadError(
            "names", f"{expected.source}: tensors beside the model are {names}, expected {', '.join(wanted) or 'none'}"
        )
    if report.evaluation is None:
        return
    (confusion,) = others
    if confusion.codec != "i64":
        raise PayloadError("dtype", f"{expected.source}: {CONFUSION!r} came as {confusion.codec}, expected i64")
    num_rows = expected.num_classes if expected.num_classes <= MATRIX_CLASSES else 3
    if confusion.shape != (num_rows, expected.num_classes):
        raise PayloadError(
            "shape",
            f"{expected.source}: {CONFUSION!r} has shape {list(confusion.shape)}, "
            f"expected {[num_rows, expected.num_classes]}: the run has {expected.num_classes} classes",
        )
    evaluation = report.evaluation
    if not evaluation.num_correct <= evaluation.num_samples <= expected.max_samples or evaluation.loss_sum < 0:
        raise PayloadError(
            "evaluation",
            f"{expected.source} claims {evaluation.num_correct} correct answers on {evaluation.num_samples} "
            f"test samples (at most {expected.max_samples}) with a loss of {evaluation.loss_sum:g}",
        )


def read_confusion(path: Path, report: Report) -> tuple[int, ...]:
    """The counts per class of an update whose header has been checked, if they are those of the report.

    Raises `PayloadError`. Little endian, as every supported machine.
    """
    evaluation = report.evaluation
    if evaluation is None:
        return ()
    header = read_header(path)
    entry = next(e for e in header.entries if e.name == CONFUSION)
    fd = os.open(path, os.O_RDONLY)
    try:
        counts = array.array("q", os.pread(fd, entry.nbytes, header.data_offset + entry.offset))
    finally:
        os.close(fd)
    num_samples, num_correct = _totals(counts, entry.shape)
    if (num_samples, num_correct) != (evaluation.num_samples, evaluation.num_correct) or min(counts) < 0:
        raise PayloadError(
            "evaluation",
            f"the counts per class have {num_correct} correct of {num_samples} test samples, "
            f"the report {evaluation.num_correct} of {evaluation.num_samples}",
        )
    return tuple(counts)


def _totals(counts: Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
    """Samples and correct answers of a matrix, or of true positives, false positives and false negatives."""
    num_rows, n = shape
    if num_rows == n:
        return sum(counts), sum(counts[:: n + 1])
    right, called, missed = (sum(counts[k * n : (k + 1) * n]) for k in range(3))
    if called != missed:
        raise PayloadError(
            "evaluation", f"{called} false positives and {missed} false negatives: every wrong answer is one of each"
        )
    return right + missed, right
