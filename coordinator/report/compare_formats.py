"""How a comparison is written: for people, for spreadsheets, for papers, for programs."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.columns import align, duration, plain
from coordinator.report.compare import Comparison, Row, Spread
from edge_client.config.files import format_bytes
from edge_client.records import to_map

__all__ = ["FORMATS", "Column", "columns", "explained", "setting_names", "setting_text", "told_left_out"]

_MAX_CELL = 40
_NEVER, _UNKNOWN = "never", "-"
_COMMON = {  # what a reader asks first, if all runs have it in common
    "model.name": "model",
    "task.name": "task",
    "simulate.data": "data",
    "simulate.partition": "partition",
    "simulate.devices": "devices",
    "simulate.training-budgets": "training budgets",
    "stop.rounds": "rounds at most",
}
_NAMES = {"method.name": "method", "model.name": "model", "task.name": "task"}
_TAKEN = {"seeds", "rounds", "best", "up", "down", "peak", "time", "accuracy", "loss", "name"}  # by other columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column as people read it."""

    head: str
    cells: Sequence[str]
    best: frozenset[int] = frozenset()  # rows
    is_number: bool = True


# what all formats for people have


def columns(found: Comparison) -> list[Column]:
    """What differs, then the numbers; a column that nothing is known for is left out."""
    rows = found.rows
    names = setting_names(found.differing)
    made = [
        Column(head=name, cells=[setting_text(row.settings.get(key)) for row in rows], is_number=False)
        for key, name in names.items()
    ]
    made.append(Column(head="seeds", cells=[str(len(row.seeds)) for row in rows]))
    made.append(Column(head="rounds", cells=[_count(row.num_rounds) for row in rows]))
    made.append(_spreads(found.metric, found, lambda row: row.last, found.metric))
    made.append(_spreads("best", found, lambda row: row.best, found.metric))
    made.append(_spreads("worst device", found, lambda row: row.worst_device, "accuracy"))
    made += _target_columns(found)
    for head, moved in (("up", [row.bytes_up for row in rows]), ("down", [row.bytes_down for row in rows])):
        made.append(Column(head=head, cells=[_size(value) for value in moved], best=_lowest(moved, _size)))
    made.append(Column(head="peak", cells=[_peak(row) for row in rows]))
    made.append(Column(head="time", cells=[duration(row.seconds) for row in rows]))
    return [column for column in made if not set(column.cells) <= {_UNKNOWN}]


def _spreads(head: str, found: Comparison, of: Callable[[Row], Spread | None], metric: str) -> Column:
    spreads = [of(row) for row in found.rows]
    cells = [_spread(spread, len(row.seeds)) for spread, row in zip(spreads, found.rows, strict=True)]
    sign = 1 if metric == "loss" else -1
    rated = [sign * spread.mean if spread is not None else None for spread in spreads]
    return Column(head=head, cells=cells, best=_lowest(rated, lambda value: f"{value:.4f}"))


def _spread(spread: Spread | None, num_seeds: int) -> str:
    if spread is None:
        return _UNKNOWN
    sd = f" ± {spread.sd:.4f}" if spread.sd is not None else ""
    return f"{spread.mean:.4f}{sd}{_of_seeds(len(spread.values), num_seeds)}"


def _of_seeds(num: int, num_seeds: int) -> str:
    return f" ({num} of {num_seeds})" if num < num_seeds else ""


def _target_columns(found: Comparison) -> list[Column]:
    at = [(row.to_target, len(row.seeds)) for row in found.rows]
    reached = [(there, num_seeds) for there, num_seeds in at if there is not None]
    if found.target is None:
        return []
    # whoever got there with all seeds is not compared with who got there with one
    most = max((there.num / num_seeds for there, num_seeds in reached), default=0.0)
    rated = [there if there.num / num_seeds == most else None for there, num_seeds in reached]
    return [
        Column(
            head=f"rounds to {found.target:g}",
            cells=[_at_target(there.rounds, _count, there.num, num_seeds) for there, num_seeds in reached],
            best=_lowest([there.rounds if there else None for there in rated], _count),
        ),
        Column(
            head=f"bytes to {found.target:g}",
            cells=[_at_target(there.bytes, _size, there.num, num_seeds) for there, num_seeds in reached],
            best=_lowest([there.bytes if there else None for there in rated], _size),
        ),
    ]


def _at_target(value: float | None, text: Callable[[float], str], num: int, num_seeds: int) -> str:
    return _NEVER if value is None else f"{text(value)}{_of_seeds(num, num_seeds)}"


def _lowest(values: Sequence[float | None], text: Callable[[float], str]) -> frozenset[int]:
    """The rows that show the lowest value; none if all show it."""
    known = [value for value in values if value is not None]
    shown = text(min(known)) if known else ""
    rows = frozenset(i for i, value in enumerate(values) if value is not None and text(value) == shown)
    return rows if len(rows) < len(values) else frozenset()


def _count(value: float) -> str:
    return f"{value:.4g}"


def _size(value: float) -> str:
    return format_bytes(round(value))


def _peak(row: Row) -> str:
    if row.peak is None:
        return _UNKNOWN
    used = format_bytes(row.peak.peak_bytes)
    if row.peak.share is None:
        return used
    return f"{used} of {format_bytes(row.peak.budget_bytes or 0)} ({100 * row.peak.share:.0f} %)"


def setting_names(keys: Sequence[str]) -> dict[str, str]:
    """Keys of a run file as short as they are clear: `method.name` is method, `train.lr` is lr."""
    short = [key.rpartition(".")[2] for key in keys]
    return {
        key: _NAMES.get(key, last if last not in _TAKEN and short.count(last) == 1 else key)
        for key, last in zip(keys, short, strict=True)
    }


def setting_text(value: object) -> str:
    """A value of a run file in a cell."""
    if value is None:
        return _UNKNOWN
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(setting_text(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or "none"


def explained(found: Comparison) -> list[str]:
    """What the numbers are."""
    if not found.rows:
        return ["no run is finished"]
    lines = [
        f"{found.metric} after the last round, best: in each seed's best round; "
        "mean ± standard deviation over the seeds (n - 1)"
    ]
    if any(row.worst_device is not None for row in found.rows):
        lines.append("worst device: lowest accuracy that a device has on its own test data after the last round")
    if found.target is not None:
        lines.append(
            f"to {found.target:g}: rounds, and bytes up and down, until {found.metric} was there for the first time; "
            "mean over the seeds that got there"
        )
    lines.append("up, down: by all devices in all rounds; peak: what training took where it came nearest to its budget")
    common = [f"{name} {setting_text(found.same[key])}" for key, name in _COMMON.items() if key in found.same]
    return [*lines, f"in all: {'; '.join(common)}"] if common else lines


def told_left_out(found: Comparison) -> list[str]:
    """The runs that no number is from, and why."""
    return [
        f"{run.folder}: the same run as {run.same_as}, counted once"
        if run.same_as
        else f"{run.folder}: not finished, {run.num_rounds} of {run.rounds_wanted} rounds; not in the numbers"
        for run in found.left_out
    ]


# the formats


def _table(found: Comparison) -> str:
    made = columns(found)
    rows = list(zip(*(column.cells for column in made), strict=True))
    right = [i for i, column in enumerate(made) if column.is_number]
    table = align([column.head for column in made], [[_cut(c) for c in row] for row in rows], right=right)
    return _joined("\n".join(explained(found)), table if rows else "", "\n".join(told_left_out(found)))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"


def _joined(*pieces: str) -> str:
    return "\n\n".join(piece for piece in pieces if piece)


def _markdown(found: Comparison) -> str:
    made = columns(found)
    rule = "|".join("---:" if column.is_number else "---" for column in made)
    lines = [f"| {' | '.join(_md(column.head) for column in made)} |", f"|{rule}|"]
    for i in range(len(found.rows)):
        cells = (_md(_cut(column.cells[i])) for column in made)
        bold = (f"**{c}**" if i in column.best else c for c, column in zip(cells, made, strict=True))
        lines.append(f"| {' | '.join(bold)} |")
    notes = "\n".join(f"- {_md(line)}" for line in (*explained(found), *told_left_out(found)))
    return _joined("\n".join(lines) if found.rows else "", notes)


def _md(text: str) -> str:
    return re.sub(r"([\\`*_|<\[\]])", r"\\\1", plain(text))


def _latex(found: Comparison) -> str:
    made = columns(found)
    comments = [f"% {plain(line)}" for line in (*explained(found), *told_left_out(found))]
    lines = [f"\\begin{{tabular}}{{{''.join('r' if column.is_number else 'l' for column in made)}}}", "\\toprule"]
    lines += [" & ".join(_tex(column.head) for column in made) + r" \\", "\\midrule"]
    for i in range(len(found.rows)):
        cells = (_tex(_cut(column.cells[i])) for column in made)
        bold = (f"\\textbf{{{c}}}" if i in column.best else c for c, column in zip(cells, made, strict=True))
        lines.append(" & ".join(bold) + r" \\")
    lines += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join(["% needs \\usepackage{booktabs}", *comments, *(lines if found.rows else [])])


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "…": r"\ldots{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(c, c) for c in plain(text))


def _csv(found: Comparison) -> str:
    """Plain numbers, all digits; sizes in bytes, times in seconds. What is not known is empty."""
    names = setting_names(found.differing)
    rows = [
        {**{name: _bare(row.settings.get(key)) for key, name in names.items()}, **_csv_numbers(found, row)}
        for row in found.rows
    ]
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def _bare(value: object) -> str:
    return "" if value is None else setting_text(value)


def _csv_numbers(found: Comparison, row: Row) -> dict[str, object]:
    metric = found.metric.replace("-", "_")
    spreads = {metric: row.last, f"best_{metric}": row.best, "worst_device_accuracy": row.worst_device}
    numbers: dict[str, object] = {"seeds": len(row.seeds), "rounds": row.num_rounds}
    for name, spread in spreads.items():
        numbers |= {name: spread.mean if spread else None, f"{name}_sd": spread.sd if spread else None}
    if row.to_target is not None:
        at = row.to_target
        numbers |= {"target": found.target, "seeds_at_target": at.num}
        numbers |= {"rounds_to_target": at.rounds, "bytes_to_target": at.bytes}
    peak = row.peak
    return numbers | {
        "bytes_up": row.bytes_up,
        "bytes_down": row.bytes_down,
        "peak_bytes": peak.peak_bytes if peak else None,
        "peak_budget_bytes": peak.budget_bytes if peak else None,
        "seconds": round(row.seconds, 3),
    }


def _json(found: Comparison) -> str:
    data: dict[str, Any] = to_map(found)
    return json.dumps(data, indent=1)


FORMATS: Mapping[str, Callable[[Comparison], str]] = {
    "table": _table,
    "csv": _csv,
    "md": _markdown,
    "latex": _latex,
    "json": _json,
}
