"""The quality of a model from the test results of each device: exact over the fleet, because counts add up."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.store.rows import SERVER, EvaluationRow, LeftOutRow
from edge_client.records import MATRIX_CLASSES

__all__ = ["FleetResult", "per_architecture", "scores_of_classes", "summarize", "untested"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """A version judged on all test samples of the devices that answered, or of the server."""

    version: int
    num_devices: int  # that judged it; 0: the server did
    num_samples: int  # each once, though the server judges every slice on all of its own
    accuracy: float
    loss: float
    balanced_accuracy: float
    macro_f1: float
    recall: tuple[float | None, ...]  # per class; None for a class that nobody has


def summarize(version: int, rows: Sequence[EvaluationRow], num_classes: int) -> FleetResult | None:
    """Add the counts of all devices and slices; None if nobody answered."""
    num_answers = sum(row.num_samples for row in rows)
    if num_answers == 0:
        return None
    samples_of = {row.device: row.num_samples for row in rows}
    total = _no_counts(num_classes)
    for row in rows:
        total[: len(row.confusion)] = map(operator.add, total, row.confusion)
    recalls, f1s = _per_class(total, num_classes)
    present = [r for r in recalls if r is not None]
    return FleetResult(
        version=version,
        num_devices=len(samples_of.keys() - {SERVER}),
        num_samples=sum(samples_of.values()),
        accuracy=sum(row.num_correct for row in rows) / num_answers,
        loss=sum(row.loss_sum for row in rows) / num_answers,
        balanced_accuracy=sum(present) / len(present) if present else 0.0,
        macro_f1=sum(f1s) / len(f1s) if f1s else 0.0,
        recall=recalls,
    )


def scores_of_classes(counts: Sequence[int], num_classes: int) -> tuple[float, tuple[float | None, ...]]:
    """The macro-F1, and the recall of each class, from confusion counts that somebody has added up."""
    total = _no_counts(num_classes)
    total[: len(counts)] = counts
    recalls, f1s = _per_class(total, num_classes)
    return (sum(f1s) / len(f1s) if f1s else 0.0), recalls


def _no_counts(num_classes: int) -> list[int]:
    return [0] * (num_classes * (num_classes if num_classes <= MATRIX_CLASSES else 3))


def per_architecture(rows: Sequence[EvaluationRow]) -> dict[str, float]:
    """How much of the model was judged -> its accuracy."""
    names = sorted({row.slice for row in rows if row.num_samples})
    judged = {name: [row for row in rows if row.slice == name] for name in names}
    return {
        name: sum(row.num_correct for row in of_name) / sum(row.num_samples for row in of_name)
        for name, of_name in judged.items()
    }


def untested(rows: Sequence[EvaluationRow]) -> LeftOutRow | None:
    """How a run lacks the server's test data that judged a version on no samples; None if it judged it, or nobody."""
    last = max((row for row in rows if row.device == SERVER), key=lambda row: row.version, default=None)
    if last is None or last.num_samples:
        return None
    detail = "the server's test data (evaluate.on) has no samples: no version is judged, rules about scores never hold"
    return LeftOutRow(run=last.run, device="", code="no_test_data", round=last.version, detail=detail)


def _per_class(counts: Sequence[int], n: int) -> tuple[tuple[float | None, ...], list[float]]:
    """Recall per class and the F1 of every class that occurs."""
    recalls: list[float | None] = []
    f1s: list[float] = []
    for true_positive, actual, predicted in _totals(counts, n):
        recalls.append(true_positive / actual if actual else None)
        if actual:
            f1s.append(2 * true_positive / (actual + predicted))
    return tuple(recalls), f1s


def _totals(counts: Sequence[int], n: int) -> list[tuple[int, int, int]]:
    """True positives, samples and answers of each class, from either form that `records.Evaluation` describes."""
    if n <= MATRIX_CLASSES:
        return [(counts[k * n + k], sum(counts[k * n : (k + 1) * n]), sum(counts[k::n])) for k in range(n)]
    right, called, missed = (counts[k * n : (k + 1) * n] for k in range(3))
    return [(tp, tp + fn, tp + fp) for tp, fp, fn in zip(right, called, missed, strict=True)]
