"""What a unit of a model costs, as rows of numbers: measured once, kept in a file, sent to devices that cannot measure.

    bytes of a moment = per_sample x microbatch + constant

Every allocation of a training step is linear in the number of samples, so two small batches determine it (`Line`).
Which moment is the worst may change with the batch, hence a peak is a few lines, whose largest counts (`Lines`).
Covers: the records, their file, and arithmetic on lines. Does not cover: measuring (`calibration`), adding up (`cost`).
No torch.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from edge_client.errors import PayloadError
from edge_client.records import Between, Count, Hash, Matches, Positive, Text, from_map, later, to_map

__all__ = [
    "FORMAT",
    "MODES",
    "ROWS_KEY",
    "Line",
    "Lines",
    "ModelRows",
    "UnitRow",
    "envelope",
    "line_through",
    "load_rows",
    "minus",
    "peak",
    "plus",
    "save_rows",
]

_log = logging.getLogger(__name__)

Line = tuple[float, float]  # bytes per sample, bytes
Lines = tuple[Line, ...]

MODES = ("plain", "fused", "units")  # what is recomputed: nothing, inside of units, whole units
FORMAT = 3
ROWS_KEY = "x-rows"  # of a run's settings as they travel: slice -> the rows that its calibration brought
_MAX_FILE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow:
    """One unit. `held`: what stays from the first unit to the end of this one's forward, without its output."""

    name: Text
    kind: Annotated[str, Matches(r"stem|block|head")]
    parameter_bytes: Count  # of those that are trained
    largest_bytes: Count  # of one of them
    out_bytes: Count  # of one sample's output
    held: Line
    forward: Lines  # above `held` of the unit before
    backward: Lines  # the same, gradients of its own parameters included; those of later units come on top
    adding: Lines  # the same for a later piece of a batch: the gradients of earlier pieces come on top, of all units
    evaluate: Lines  # a forward pass without gradient, its input included
    forward_s: Line  # seconds
    backward_s: Line
    paper: Line = (0.0, 0.0)  # what FeDepth's Table 1 charges for it
    # a block as the first of a group, whose input needs no gradient (the first block: with the stem)
    alone_held: Line = (0.0, 0.0)
    alone_forward: Lines = ()  # above nothing
    alone_backward: Lines = ()  # above nothing; gradients of its own parameters included
    alone_adding: Lines = ()  # of a later piece
    head_forward: Lines = ()  # the head behind this block: above `alone_held`
    head_backward: Lines = ()  # the same, gradients of the head's parameters included
    head_adding: Lines = ()  # of a later piece
    hidden_bytes: Count = 0  # what libraries take and torch does not see, until this block has been trained as a group
    hidden_size_bytes: Count = 0  # of that, for each number of samples that a pass has, beyond two


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRows:
    """All units of a model in each mode that it has, in one layout, as one build of torch runs them."""

    format: Annotated[int, Between(FORMAT, FORMAT)] = FORMAT
    key: Hash
    torch: Text
    machine: Text
    channels_last: bool
    dtype: Annotated[str, Matches(r"fp32|bf16|fp16")] = "fp32"
    batches: tuple[Positive, Positive]
    base_bytes: Count  # RSS of a worker with this model, warmed up
    model_bytes: Count  # of that, parameters and buffers
    hidden_bytes: Count  # what libraries take and torch does not see, where all units are trained at once
    hidden_size_bytes: Count = 0  # for each number of samples that a pass has, beyond two
    hidden_rest_bytes: Count = 0  # where an epoch ends with one sample: what it takes more than a few
    has_batchnorm: bool  # whose statistics are those of a microbatch
    has_batch_statistics: bool  # a BatchNorm without running ones: frozen units need the whole microbatch, too
    min_batch: Positive
    modes: dict[str, tuple[UnitRow, ...]]
    margin: Annotated[float, Between(1, 2)] = 1.0  # on top, for rows of another kind of machine or build of torch
    private_base_bytes: Count = later(0, key="x-private-base")  # private memory of that worker; 0: not measured
    # `hidden_bytes` without pages of files, by the samples of a pass: recurrent layers need more for more samples, and
    # read many pages. (0, 0): the constant says nearly the same. Older versions go by the constant.
    hidden_line: Line = later((0.0, 0.0), key="x-hidden-line")

    def hidden_at(self, num_samples: int) -> float:
        """What libraries take and torch does not see, where all units are trained at once on so many samples."""
        slope, constant = self.hidden_line
        return slope * num_samples + constant if slope + constant > 0 else self.hidden_bytes

    @property
    def worker_bytes(self) -> int:
        """What a worker counts for before it trains: private memory, or RSS in rows of older versions."""
        return self.private_base_bytes or self.base_bytes


def line_through(batches: tuple[int, int], one: float, other: float) -> Line:
    """The line through what two batches took; never falling, so that rounding makes no larger batch cheaper."""
    slope = max(0.0, (other - one) / (batches[1] - batches[0]))
    return slope, max(one - slope * batches[0], other - slope * batches[1])


def plus(line: Line, other: Line) -> Line:
    """Both together."""
    return line[0] + other[0], line[1] + other[1]


def minus(line: Line, other: Line) -> Line:
    """What is left of a line."""
    return line[0] - other[0], line[1] - other[1]


def envelope(lines: Iterable[Line]) -> Lines:
    """The lines that are the largest one somewhere from one sample on, by rising slope."""
    hull: list[Line] = []
    for line in sorted(set(lines)):
        if hull and line[0] == hull[-1][0]:
            hull.pop()  # a parallel that is higher
        while len(hull) > 1 and _crossing(hull[-2], line) <= _crossing(hull[-2], hull[-1]):
            hull.pop()
        hull.append(line)
    while len(hull) > 1 and _crossing(hull[0], hull[1]) <= 1:
        hull.pop(0)
    return tuple(hull)


def _crossing(low: Line, steep: Line) -> float:
    """The batch from which the steeper line is the larger one."""
    return (low[1] - steep[1]) / (steep[0] - low[0])


def peak(lines: Lines, num_samples: int) -> float:
    """The largest of the lines at a batch; 0 without any."""
    return max((slope * num_samples + constant for slope, constant in lines), default=0.0)


def load_rows(path: Path, *, key: str | None = None) -> ModelRows | None:
    """The rows in a file; None if there is none. What makes no sense, or has another key, is ignored with a warning."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        rows = from_map(ModelRows, json.loads(text), where=str(path))
        if key is not None and rows.key != key:
            raise PayloadError("key", f"{path}: expected the rows {key}, got {rows.key}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, PayloadError) as error:
        _log.warning("%s: not usable as cost rows, ignored (%s)", path, str(error)[:200])
        return None
    return rows


def save_rows(path: Path, rows: ModelRows) -> None:
    """By rename, without a sync: they can be measured again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(to_map(rows)), encoding="utf-8")
    os.replace(temporary, path)
