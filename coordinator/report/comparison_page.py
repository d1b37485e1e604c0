"""A page about several simulations: for each method the mean over its seeds, in a band of one standard deviation.

Covers: what `coordinator compare` prints, as plots. Does not cover: a page about one run
(`coordinator.report.run_page`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from coordinator.report import compare, compare_formats, plots
from coordinator.report import html as page
from coordinator.report import tables as report_tables
from coordinator.report.compare import Comparison, Group, Row
from coordinator.results.run_record import RunRecord, is_better

__all__ = ["render"]

Values = Mapping[int, float]  # round -> value
_MAX_PANELS = 6
_EVERY_SEED = "lines end with the last round that every seed has"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row of the table, with its runs and its name in legends."""

    name: str
    runs: Sequence[RunRecord]
    row: Row


def render(title: str, runs: Sequence[RunRecord]) -> str:
    """The page about the runs."""
    comparison = compare.compare(runs)
    entries = _entries(comparison, compare.grouped(runs).groups)
    shown = _shown(entries)
    plot_sections = (_progress(shown), _architectures(shown), _traffic(shown), _against_bytes(shown), _memory(shown))
    pieces = (
        _head(title, runs),
        page.tiles(_facts(comparison, entries)),
        _table(comparison, len(entries) - len(shown)),
        page.pairs(plot_sections),
        _plans(entries),
        _left_out(comparison),
        _in_common(comparison),
        _environment(runs),
    )
    return page.page(title, pieces)


def _entries(comparison: Comparison, groups: Sequence[Group]) -> list[_Entry]:
    names = compare_formats.setting_names(comparison.differing)
    return [_Entry(_name(row, names), group.runs, row) for row, group in zip(comparison.rows, groups, strict=True)]


def _name(row: Row, names: Mapping[str, str]) -> str:
    """`fedprox, mu 0.1`: the method, then what else differs."""
    (_, method), *others = row.settings.items()
    return ", ".join([str(method), *(f"{names[key]} {compare_formats.setting_text(v)}" for key, v in others)])


def _shown(entries: Sequence[_Entry]) -> list[_Entry]:
    """The entries with the highest accuracy, as many as plots have room for."""
    best = sorted(entries, key=lambda entry: -(entry.row.last.mean if entry.row.last is not None else 0.0))
    names = {entry.name for entry in best[: plots.MAX_CURVES]}
    return [entry for entry in entries if entry.name in names]


# the head of the page


def _head(title: str, runs: Sequence[RunRecord]) -> str:
    models = dict.fromkeys(run.file.what for run in runs)
    methods = dict.fromkeys(run.file.method.name for run in runs)
    data = dict.fromkeys(run.file.simulate.data for run in runs if run.file.simulate is not None)
    what = " · ".join(", ".join(filter(None, names)) for names in (methods, models, data) if any(names))
    return f"<header><h1>{page.text(title)}</h1>{page.note(what)}</header>"


def _facts(comparison: Comparison, entries: Sequence[_Entry]) -> Iterator[tuple[str, str]]:
    judged = [(entry.row.last.mean, entry.name) for entry in entries if entry.row.last is not None]
    yield "finished runs", str(sum(len(row.seeds) for row in comparison.rows))
    yield "rows", str(len(comparison.rows))
    unfinished = [run for run in comparison.left_out if not run.same_as]
    if unfinished:
        yield "not finished", str(len(unfinished))
    best: tuple[float, str] | None = None
    for mean, name in judged:
        if best is None or is_better(comparison.metric, mean, best[0]):
            best = (mean, name)
    if best is not None:
        yield f"best {comparison.metric} after the last round", f"{best[0]:.4f}"
        yield "by", best[1]


def _table(comparison: Comparison, num_not_drawn: int) -> str:
    if not comparison.rows:
        return ""
    columns = compare_formats.columns(comparison)
    rows = [
        [page.Html(f"<b>{page.text(c.cells[i])}</b>") if i in c.best else c.cells[i] for c in columns]
        for i in range(len(comparison.rows))
    ]
    right = [i for i, column in enumerate(columns) if column.is_number]
    table = page.table([column.head for column in columns], rows, right=right)
    lines = compare_formats.explained(comparison)
    if num_not_drawn:
        lines.append(f"the plots show the {plots.MAX_CURVES} rows with the highest accuracy")
    return page.section("Comparison", table, page.note(*lines))


# plots


def _progress(entries: Sequence[_Entry]) -> str:
    curves = [_mean(entry, _accuracies) for entry in entries]
    if not any(curve.points for curve in curves):
        return ""
    png = plots.lines([plots.Panel(curves=curves, y="accuracy", highest=1.0)], x="after round")
    explanation = page.note(f"{_means(entries)}; {_EVERY_SEED}")
    return page.section(
        "Accuracy over the rounds", page.image(png, "accuracy of each method after each round"), explanation
    )


def _means(entries: Sequence[_Entry]) -> str:
    several = any(len(entry.runs) > 1 for entry in entries)
    return "mean over seeds, in a band of ± one standard deviation (n - 1)" if several else "one seed each"


def _accuracies(run: RunRecord) -> Values:
    return {record.number: record.accuracy for record in run.rounds if record.accuracy is not None}


def _mean(entry: _Entry, values_of: Callable[[RunRecord], Values], name: str = "") -> plots.Curve:
    """The mean over the rounds that every seed has: a mean over fewer seeds would jump where one ends."""
    values = [values_of(run) for run in entry.runs]
    rounds = sorted(set.intersection(*(set(of_seed) for of_seed in values)))
    columns = [[of_seed[number] for of_seed in values] for number in rounds]
    return plots.Curve(
        name=name or entry.name,
        points=[(number, statistics.fmean(column)) for number, column in zip(rounds, columns, strict=True)],
        spread=[statistics.stdev(column) if len(column) > 1 else None for column in columns],
    )


def _architectures(entries: Sequence[_Entry]) -> str:
    """For methods that keep several models: one panel per architecture, or one line each of a single method."""
    names = sorted({name for entry in entries for name in entry.row.per_architecture})
    if len(names) < 2:
        return ""
    if len(entries) == 1:
        shown = names[: plots.MAX_CURVES]
        curves = [_mean(entries[0], partial(_of_architecture, name=name), name) for name in shown]
        panels = [plots.Panel(curves=curves, y="accuracy", highest=1.0)]
    else:
        shown = names[:_MAX_PANELS]
        panels = _architecture_panels(shown, entries)
    png = plots.lines(panels, x="after round")
    more = page.note(f"the first {len(shown)} of {len(names)}") if len(shown) < len(names) else ""
    return page.section("Accuracy of each architecture", page.image(png, "accuracy of each architecture"), more)


def _reach(curve: plots.Curve) -> Iterator[float]:
    """The ends of a curve's band, and its points where it has none."""
    for number, (_, y) in enumerate(curve.points):
        spread = (curve.spread[number] if number < len(curve.spread) else None) or 0.0
        yield from (y - spread, y + spread)


def _architecture_panels(names: Sequence[str], entries: Sequence[_Entry]) -> list[plots.Panel]:
    """One panel per architecture, all with the same limits."""
    curves_by_name = {name: [_mean(entry, partial(_of_architecture, name=name)) for entry in entries] for name in names}
    values = [value for curves in curves_by_name.values() for curve in curves for value in _reach(curve)]
    limits = (max(0.0, min(values) - 0.03), min(1.0, max(values) + 0.03))
    return [
        plots.Panel(curves=[c for c in curves if c.points], y="accuracy", title=name, limits=limits)
        for name, curves in curves_by_name.items()
    ]


def _of_architecture(run: RunRecord, name: str) -> Values:
    return {record.number: record.per_architecture[name] for record in run.rounds if name in record.per_architecture}


def _traffic(entries: Sequence[_Entry]) -> str:
    means = (_mean(entry, _moved) for entry in entries)
    moved = [plots.Curve(name=curve.name, points=curve.points) for curve in means]  # bands of so many would hide them
    so_far = [_mean(entry, _moved_so_far) for entry in entries]
    if not any(curve.points for curve in moved):
        return ""
    png = plots.lines([plots.bytes_panel(moved, "in the round"), plots.bytes_panel(so_far, "so far")], x="round")
    return page.section("Bytes moved, up and down", page.image(png, "bytes moved by each method over the rounds"))


def _moved(run: RunRecord) -> Values:
    return {record.number: (record.bytes_up or 0) + (record.bytes_down or 0) for record in run.rounds if record.number}


def _moved_so_far(run: RunRecord) -> Values:
    return {number: total for number, total in compare.cumulative_bytes(run).items() if number}


def _against_bytes(entries: Sequence[_Entry]) -> str:
    """Accuracy over the bytes that were moved for it."""
    curves = []
    for entry in entries:
        judged = _mean(entry, _accuracies)
        moved = dict(_mean(entry, compare.cumulative_bytes).points)
        curves.append(
            plots.Curve(name=entry.name, points=[(moved[x], y) for x, y in judged.points], spread=judged.spread)
        )
    if not any(curve.points for curve in curves):
        return ""
    unit, size = plots.unit(max(x for curve in curves for x, _ in curve.points))
    scaled = [plots.Curve(name=c.name, points=[(x / size, y) for x, y in c.points], spread=c.spread) for c in curves]
    panel = plots.Panel(curves=scaled, y="accuracy", highest=1.0)
    png = plots.lines([panel], x=f"{unit} moved so far, up and down", whole=False)
    return page.section("Accuracy against bytes", page.image(png, "accuracy of each method over the bytes moved"))


@dataclass(frozen=True, slots=True)
class _BudgetPeak:
    """The highest memory of training over all devices with one budget, in all seeds of one row."""

    name: str
    budget: int | None
    peak: int
    predicted: int | None

    @property
    def share(self) -> float:
        return self.peak / self.budget if self.budget else 0.0


def _memory(entries: Sequence[_Entry]) -> str:
    used = list(_used(entries))
    if not used:
        return ""
    nearest = sorted(used, key=lambda one: -one.share)[: plots.MAX_BARS]
    shown = _with_gaps(sorted((one for one in used if one in nearest), key=lambda one: one.budget or 0))
    unit, size = plots.unit(max(max(one.peak, one.budget or 0, one.predicted or 0) for one in shown))
    chart = plots.Bars(
        labels=[one.name for one in shown],
        parts={"highest measured peak": [one.peak / size for one in shown]},
        marks=[one.predicted / size if one.predicted else None for one in shown],
        limits=[one.budget / size if one.budget else None for one in shown],
        notes=[f"{100 * one.share:.0f} %" if one.budget else "" for one in shown],
        unit=unit,
    )
    title = f"Peak memory of training{' against its budget' if any(chart.limits) else ''}"
    more = f"the nearest to their budgets, {len(nearest)} of {len(used)}; " if len(nearest) < len(used) else ""
    explanation = page.note(
        f"{more}the highest of all devices with one budget, in all seeds", report_tables.SHARED_WORKERS
    )
    return page.section(title, page.image(plots.bars(chart), "peaks, predictions and budgets"), explanation)


def _with_gaps(used: Sequence[_BudgetPeak]) -> list[_BudgetPeak]:
    """Insert an empty bar between two budgets."""
    spaced: list[_BudgetPeak] = []
    for one in used:
        if spaced and spaced[-1].budget != one.budget:
            spaced.append(_BudgetPeak("", None, 0, None))
        spaced.append(one)
    return spaced


def _used(entries: Sequence[_Entry]) -> Iterator[_BudgetPeak]:
    for entry in entries:
        devices = [device for run in entry.runs for device in run.devices if device.peak_bytes]
        devices.sort(key=lambda device: device.budget_bytes or 0)
        for budget, members in itertools.groupby(devices, key=lambda device: device.budget_bytes):
            same = list(members)
            predicted = max(device.predicted_bytes or 0 for device in same)
            yield _BudgetPeak(entry.name, budget, max(device.peak_bytes or 0 for device in same), predicted or None)


# tables


def _plans(entries: Sequence[_Entry]) -> str:
    rows = []
    for entry in entries:
        devices = [device for run in entry.runs for device in run.devices]
        rows += [[entry.name, *row] for row in report_tables.plan_rows(devices)]
    heads = ["devices, all seeds" if head == "devices" else head for head in report_tables.PLAN_HEADS]
    return page.section("Plans", page.table(["", *heads], rows, right=(1, 3, 4, 5, 6))) if rows else ""


def _left_out(comparison: Comparison) -> str:
    lines = compare_formats.left_out_lines(comparison)
    return page.section("Not in the numbers", page.note(*lines)) if lines else ""


def _in_common(comparison: Comparison) -> str:
    """The settings that all runs share, as a run file."""
    flat = dict(comparison.same) | (dict(comparison.rows[0].settings) if len(comparison.rows) == 1 else {})
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, last = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[last] = value
    file = f"<pre>{page.text(report_tables.as_toml(nested))}</pre>"
    return page.section("Run file, what all have in common", file) if flat else ""


def _environment(runs: Sequence[RunRecord]) -> str:
    rows = report_tables.environment_rows([run.environment for run in runs])
    return page.section("Versions and the machine", page.table(("what", "value"), rows)) if rows else ""
