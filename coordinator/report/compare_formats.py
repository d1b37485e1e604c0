"""A comparison as text: tables for people, for spreadsheets, for papers and for programs."""

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
from edge_client.config.quantities import format_bytes
from edge_client.records import to_map

__all__ = ["FORMATS", "Column", "columns", "explained", "left_out_lines", "setting_names", "setting_text"]

_MAX_CELL = 40
_NEVER, _UNKNOWN = "never", "-"
_COMMON = {  # settings that a reader looks for first, if all runs share them
    "model.name": "model",
    "task.name": "task",
    "simulate.data": "data",
    "simulate.partition": "partition",
    "simulate.devices": "devices",
    "simulate.training-budgets": "training budgets",
    "stop.rounds": "rounds at most",
}
_NAMES = {"method.name": "method", "model.name": "model", "task.name": "task"}
_OTHER_HEADS = {"seeds", "rounds", "best", "up", "down", "peak", "time", "accuracy", "loss", "name"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column as people read it."""

    head: str
    cells: Sequence[str]
    best: frozenset[int] = frozenset()  # rows
    is_number: bool = True


# what all formats for people have


def columns(comparison: Comparison) -> list[Column]:
    """The settings that differ, then the numbers; a column without any known value is left out."""
    rows = comparison.rows
    names = setting_names(comparison.differing)
    table = [
        Column(head=name, cells=[setting_text(row.settings.get(key)) for row in rows], is_number=False)
        for key, name in names.items()
    ]
    table.append(Column(head="seeds", cells=[str(len(row.seeds)) for row in rows]))
    table.append(Column(head="rounds", cells=[_count(row.num_rounds) for row in rows]))
    table.append(_spreads(comparison.metric, comparison, lambda row: row.last, comparison.metric))
    table.append(_spreads("best", comparison, lambda row: row.best, comparison.metric))
    table.append(_spreads("worst device", comparison, lambda row: row.worst_device, "accuracy"))
    table += _target_columns(comparison)
    for head, moved in (("up", [row.bytes_up for row in rows]), ("down", [row.bytes_down for row in rows])):
        table.append(Column(head=head, cells=[_size(value) for value in moved], best=_lowest(moved, _size)))
    table.append(Column(head="peak", cells=[_peak(row) for row in rows]))
    table.append(Column(head="time", cells=[duration(row.seconds) for row in rows]))
    return [column for column in table if not set(column.cells) <= {_UNKNOWN}]


def _spreads(head: str, comparison: Comparison, of: Callable[[Row], Spread | None], metric: str) -> Column:
    spreads = [of(row) for row in comparison.rows]
    cells = [_spread(spread, len(row.seeds)) for spread, row in zip(spreads, comparison.rows, strict=True)]
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


def _target_columns(comparison: Comparison) -> list[Column]:
    at = [(row.to_target, len(row.seeds)) for row in comparison.rows]
    reached = [(there, num_seeds) for there, num_seeds in at if there is not None]
    if comparison.target is None:
        return []
    # rows that reached the target with all seeds are not compared with rows that did with one
    most = max((there.num / num_seeds for there, num_seeds in reached), default=0.0)
    rated = [there if there.num / num_seeds == most else None for there, num_seeds in reached]
    return [
        Column(
            head=f"rounds to {comparison.target:g}",
            cells=[_at_target(there.rounds, _count, there.num, num_seeds) for there, num_seeds in reached],
            best=_lowest([there.rounds if there else None for there in rated], _count),
        ),
        Column(
            head=f"bytes to {comparison.target:g}",
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
        key: _NAMES.get(key, last if last not in _OTHER_HEADS and short.count(last) == 1 else key)
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


def explained(comparison: Comparison) -> list[str]:
    """Lines that explain the numbers."""
    if not comparison.rows:
        return ["no run is finished"]
    lines = [
        f"{comparison.metric} after the last round, best: in each seed's best round; "
        "mean ± standard deviation over the seeds (n - 1)"
    ]
    if any(row.worst_device is not None for row in comparison.rows):
        lines.append("worst device: lowest accuracy that a device has on its own test data after the last round")
    if comparison.target is not None:
        lines.append(
            f"to {comparison.target:g}: rounds, and bytes up and down, until {comparison.metric} was there for the "
            "first time; mean over the seeds that got there"
        )
    lines.append("up, down: by all devices in all rounds; peak: what training took where it came nearest to its budget")
    same = comparison.same
    common = [f"{name} {setting_text(same[key])}" for key, name in _COMMON.items() if key in same]
    return [*lines, f"in all: {'; '.join(common)}"] if common else lines


def left_out_lines(comparison: Comparison) -> list[str]:
    """One line for each run that no number comes from, with the reason."""
    return [
        f"{run.folder}: the same run as {run.same_as}, counted once"
        if run.same_as
        else f"{run.folder}: not finished, {run.num_rounds} of {run.rounds_wanted} rounds; not in the numbers"
        for run in comparison.left_out
    ]


# the formats


def _table(comparison: Comparison) -> str:
    table_columns = columns(comparison)
    rows = list(zip(*(column.cells for column in table_columns), strict=True))
    right = [i for i, column in enumerate(table_columns) if column.is_number]
    text = align([column.head for column in table_columns], [[_cut(c) for c in row] for row in rows], right=right)
    return _joined("\n".join(explained(comparison)), text if rows else "", "\n".join(left_out_lines(comparison)))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"


def _joined(*pieces: str) -> str:
    return "\n\n".join(piece for piece in pieces if piece)


def _markdown(comparison: Comparison) -> str:
    table_columns = columns(comparison)
    rule = "|".join("---:" if column.is_number else "---" for column in table_columns)
    lines = [f"| {' | '.join(_md(column.head) for column in table_columns)} |", f"|{rule}|"]
    for i in range(len(comparison.rows)):
        cells = (_md(_cut(column.cells[i])) for column in table_columns)
        bold = (f"**{c}**" if i in column.best else c for c, column in zip(cells, table_columns, strict=True))
        lines.append(f"| {' | '.join(bold)} |")
    notes = "\n".join(f"- {_md(line)}" for line in (*explained(comparison), *left_out_lines(comparison)))
    return _joined("\n".join(lines) if comparison.rows else "", notes)


def _md(text: str) -> str:
    return re.sub(r"([\\`*_|<\[\]])", r"\\\1", plain(text))


def _latex(comparison: Comparison) -> str:
    table_columns = columns(comparison)
    comments = [f"% {plain(line)}" for line in (*explained(comparison), *left_out_lines(comparison))]
    lines = [
        f"\\begin{{tabular}}{{{''.join('r' if column.is_number else 'l' for column in table_columns)}}}",
        "\\toprule",
    ]
    lines += [" & ".join(_tex(column.head) for column in table_columns) + r" \\", "\\midrule"]
    for i in range(len(comparison.rows)):
        cells = (_tex(_cut(column.cells[i])) for column in table_columns)
        bold = (f"\\textbf{{{c}}}" if i in column.best else c for c, column in zip(cells, table_columns, strict=True))
        lines.append(" & ".join(bold) + r" \\")
    lines += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join(["% needs \\usepackage{booktabs}", *comments, *(lines if comparison.rows else [])])


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


def _csv(comparison: Comparison) -> str:
    """Plain numbers with all digits; sizes in bytes, times in seconds. Unknown values are empty."""
    names = setting_names(comparison.differing)
    rows = [
        {**{name: _bare(row.settings.get(key)) for key, name in names.items()}, **_csv_numbers(comparison, row)}
        for row in comparison.rows
    ]
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def _bare(value: object) -> str:
    return "" if value is None else setting_text(value)


def _csv_numbers(comparison: Comparison, row: Row) -> dict[str, object]:
    metric = comparison.metric.replace("-", "_")
    spreads = {metric: row.last, f"best_{metric}": row.best, "worst_device_accuracy": row.worst_device}
    numbers: dict[str, object] = {"seeds": len(row.seeds), "rounds": row.num_rounds}
    for name, spread in spreads.items():
        numbers |= {name: spread.mean if spread else None, f"{name}_sd": spread.sd if spread else None}
    if row.to_target is not None:
        at = row.to_target
        numbers |= {"target": comparison.target, "seeds_at_target": at.num}
        numbers |= {"rounds_to_target": at.rounds, "bytes_to_target": at.bytes}
    peak = row.peak
    return numbers | {
        "bytes_up": row.bytes_up,
        "bytes_down": row.bytes_down,
        "peak_bytes": peak.peak_bytes if peak else None,
        "peak_budget_bytes": peak.budget_bytes if peak else None,
        "seconds": round(row.seconds, 3),
    }


def _json(comparison: Comparison) -> str:
    data: dict[str, Any] = to_map(comparison)
    return json.dumps(data, indent=1)


FORMATS: Mapping[str, Callable[[Comparison], str]] = {
    "table": _table,
    "csv": _csv,
    "md": _markdown,
    "latex": _latex,
    "json": _json,
}
