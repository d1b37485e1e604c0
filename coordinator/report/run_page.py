"""`coordinator run report`: one self-contained HTML page about a run, with its plots.

Covers: a run of a fleet or of a simulation; both are the same record.
Does not cover: several runs side by side (`coordinator.report.comparison_page`).
"""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.report import html as page
from coordinator.report import plots
from coordinator.report import similarity as report_similarity
from coordinator.report import tables as report_tables
from coordinator.report import timeline as report_timeline
from coordinator.results.run_record import DeviceRecord, RoundRecord, RunRecord
from edge_client import durable
from edge_client.config.quantities import format_bytes
from edge_client.errors import InputError

__all__ = ["render", "write_page", "write_plots"]

_SHOWN = {"accuracy": "accuracy", "balanced-accuracy": "balanced accuracy", "macro-f1": "macro-F1", "loss": "loss"}
_STATES = ("finished", "failed", "running", "queued", "stopped", "unfinished")
_VERBS = {"queued": "Waits", "running": "Is running", "unfinished": "Is not finished"}


def write_page(content: str, path: Path) -> None:
    """Write a page completely or not at all; raises `InputError` if `path` exists and is no plain file."""
    _write(content.encode("utf-8", "replace"), path)


def write_plots(content: str, folder: Path) -> list[Path]:
    """Write the plots of a page as separate files; other files in the folder stay."""
    with durable.disk_errors(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    plots_by_name = page.images(content)
    for name, png in plots_by_name.items():
        _write(png, folder / name)
    return [folder / name for name in plots_by_name]


def _write(data: bytes, path: Path) -> None:
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode) and not path.is_dir():
        # it would be renamed over: a link, a pipe, or as root a device such as /dev/stdout
        raise InputError(f"{path}: expected a new file or a plain one, got something else; name another file")
    with durable.disk_errors(f"cannot write {path}"):
        durable.write_bytes(path, data, point="report", mode=0o644)


def render(run: RunRecord) -> str:
    """The page about a run."""
    plot_sections = (
        _progress(run),
        _architectures(run),
        _recall(run),
        _traffic(run),
        _memory(run),
        _traffic_of_devices(run),
    )
    pieces = (
        _head(run),
        page.tiles(_facts(run)),
        page.pairs(plot_sections),
        report_timeline.section(run.timeline),
        *report_similarity.sections(run),
        *report_tables.sections(run),
    )
    return page.page(run.name, pieces)


# how the run ended


def _head(run: RunRecord) -> str:
    what = [run.file.what, run.file.method.name]
    if run.folder is not None:
        what.append(f"seed {run.file.seed}, simulated")
    if run.created_s:
        what.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.created_s)))
    known = run.state if run.state in _STATES else ""
    return (
        f'<header><h1>{page.text(run.name)}<span class="state {known}">{page.text(run.state)}</span></h1>'
        f"{page.note(' · '.join(filter(None, what)), _verdict(run))}</header>"
    )


def _verdict(run: RunRecord) -> str:
    """One or two sentences: how far the run came, why it ended, and which version is the best."""
    why = f"; reason: {run.reason}" if run.reason else ""
    verb = _VERBS.get(run.state, "Ended")
    ended = f"{verb} after {run.num_rounds} of {run.file.stop.rounds} rounds{why}."
    best = _best(run)
    if best is None:
        return f"{ended} No version was judged."
    value = best.value(run.file.stop.metric)
    by = f" ({run.file.stop.metric} {value:.4f})" if value is not None else ""
    return f"{ended} The best version is the one {_after(best.number)}{by}."


def _after(version: int) -> str:
    return f"after round {version}" if version else "before the first round"


def _best(run: RunRecord) -> RoundRecord | None:
    """The best version; the newest evaluated one if the run names none."""
    named = [record for record in run.judged if record.number == run.best]
    return next(iter(named or run.judged[-1:]), None)


def _facts(run: RunRecord) -> Iterator[tuple[str, str]]:
    yield "rounds", f"{run.num_rounds} / {run.file.stop.rounds}"
    yield "devices", str(len(run.devices))
    best = _best(run)
    if best is not None:
        yield "best version", f"round {best.number}" if best.number else "the first"
        for metric, name in _SHOWN.items():
            value = best.value(metric)
            if value is not None:
                yield name, f"{value:.4f}"
        if best.num_samples:
            yield "test samples", f"{best.num_samples:,}"
    yield "moved, all devices", format_bytes(run.moved_bytes)
    if run.fedavg_bytes and run.counted_bytes:
        yield "of what FedAvg would move", f"{100 * run.counted_bytes / run.fedavg_bytes:.0f} %"


# plots


def _progress(run: RunRecord) -> str:
    if not run.judged:
        return ""
    names = sorted({name for record in run.rounds for name in record.per_device})
    of_all = ", all devices" if names else ""
    fleet = []
    for metric in ("accuracy", "macro-f1"):
        points = _points((r.number, r.value(metric)) for r in run.rounds)
        fleet.append(plots.Curve(name=f"{_SHOWN[metric]}{of_all}", points=points))
    panel = plots.Panel(
        curves=[curve for curve in fleet if curve.points],
        thin=[_points((r.number, r.per_device.get(name)) for r in run.rounds) for name in names],
        thin_name="accuracy, each device",
        marked_x=run.best,
        marked_name="best version",
        limits=(-0.02, 1.02),
    )
    return page.section(
        "Results over the rounds",
        page.image(plots.lines([panel], x="after round"), "accuracy and macro-F1 after each round"),
        page.details("numbers", _results(run.judged)),
    )


def _points(values: Iterable[tuple[int, float | None]]) -> list[tuple[float, float]]:
    """The points whose value is known."""
    return [(number, value) for number, value in values if value is not None]


def _results(judged: Sequence[RoundRecord]) -> str:
    heads = ("after round", "accuracy", "balanced", "macro-F1", "loss", "test samples", "devices")
    rows = [
        [
            record.number,
            *(_decimal(value) for value in (record.accuracy, record.balanced_accuracy, record.macro_f1, record.loss)),
            record.num_samples,
            "server" if record.num_devices == 0 else record.num_devices,
        ]
        for record in judged
    ]
    return page.table_of_known(heads, rows, right=range(len(heads)))


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _architectures(run: RunRecord) -> str:
    """The accuracy of each architecture of a method that keeps several models."""
    names = sorted({name for record in run.rounds for name in record.per_architecture})
    if len(names) < 2:
        return ""
    curves = [
        plots.Curve(name=name, points=_points((r.number, r.per_architecture.get(name)) for r in run.rounds))
        for name in names[: plots.MAX_CURVES]
    ]
    panel = plots.Panel(curves=curves, y="accuracy", limits=(-0.02, 1.02))
    last = next(record for record in reversed(run.rounds) if record.per_architecture)
    rows = [[name, _decimal(last.per_architecture.get(name))] for name in names]
    return page.section(
        "Accuracy of each architecture",
        page.image(plots.lines([panel], x="after round"), "accuracy of each architecture after each round"),
        page.note(f"the first {plots.MAX_CURVES} of {len(names)}") if len(names) > plots.MAX_CURVES else "",
        page.details("numbers", page.table(("architecture", f"after round {last.number}"), rows, right=(1,))),
    )


def _recall(run: RunRecord) -> str:
    best = _best(run)
    recall = best.recall if best is not None else ()
    known = [(name, value) for name, value in zip(run.file.classes, recall, strict=False) if value is not None]
    if not known:
        return ""
    worst = sorted(known, key=lambda pair: pair[1])[: plots.MAX_BARS] if len(known) > plots.MAX_BARS else known
    parts = {"recall": [value for _, value in worst]}
    chart = plots.Bars(labels=[name for name, _ in worst], parts=parts, unit="recall", highest=1.0)
    texts = ("nobody has it" if value is None else f"{value:.4f}" for value in recall)
    rows = list(zip(run.file.classes, texts, strict=False))
    return page.section(
        "Recall per class, best version",
        page.image(plots.bars(chart), "recall of each class"),
        _more(len(known), "the lowest"),
        page.details("numbers", page.table(("class", "recall"), rows, right=(1,))),
    )


def _traffic(run: RunRecord) -> str:
    """The bytes of each round, and of all rounds so far."""
    moved = [
        plots.Curve(name="up, from devices", points=_points((r.number, r.bytes_up) for r in run.rounds)),
        plots.Curve(name="down, to devices", points=_points((r.number, r.bytes_down) for r in run.rounds)),
    ]
    if not any(curve.points for curve in moved):
        return ""
    if run.whole_model_bytes is not None:
        one_way = _points((r.number, _times(r.num_updates, run.whole_model_bytes)) for r in run.rounds)
        moved.append(plots.Curve(name="FedAvg, each way", points=one_way, is_reference=True))
    so_far = [replace(curve, points=_added_up(curve.points)) for curve in moved]
    png = plots.lines([plots.bytes_panel(moved, "in the round"), plots.bytes_panel(so_far, "so far")], x="round")
    last = run.rounds[-1].number
    last_round = (
        page.note(f"round {last} only judged the model of round {run.num_rounds}") if last > run.num_rounds else ""
    )
    return page.section(
        "Bytes moved",
        page.image(png, "bytes moved in each round, and so far"),
        last_round,
        page.note(_against_fedavg(run)),
    )


def _times(count: int | None, size: int) -> int | None:
    return count * size if count is not None else None


def _against_fedavg(run: RunRecord) -> str:
    """The run's bytes against those of FedAvg, and how they are computed."""
    moved, reference, size = run.counted_bytes, run.fedavg_bytes, run.whole_model_bytes
    if not reference or size is None:
        return "Against FedAvg: the size of the whole model is not known yet, or nobody has trained."
    count, share = reference // (2 * size), 100 * moved / reference
    return (
        f"This run moved {format_bytes(moved)} up and down, {share:.1f} % of the {format_bytes(reference)} that FedAvg "
        f"of the whole model would have sent: {_count(count, 'training')} that counted x 2 x {format_bytes(size)}, the "
        f"model in the run's codec ({run.file.rounds.codec}). This run's bytes also have messages, frames, and what "
        "devices got that only judged."
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def _added_up(points: plots.Line) -> list[tuple[float, float]]:
    return list(zip((x for x, _ in points), itertools.accumulate(y for _, y in points), strict=True))


def _more(count: int, which: str) -> str:
    return page.note(f"{which} {plots.MAX_BARS} of {count}") if count > plots.MAX_BARS else ""


def _memory(run: RunRecord) -> str:
    measured = [device for device in run.devices if device.peak_bytes]
    if not measured:
        return ""
    nearest = sorted(measured, key=lambda d: (-_share(d), -(d.peak_bytes or 0)))[: plots.MAX_BARS]
    shown = sorted(nearest, key=lambda device: (device.budget_bytes or 0, device.name))
    unit, size = plots.unit(max(max(d.peak_bytes or 0, d.budget_bytes or 0, d.predicted_bytes or 0) for d in shown))
    chart = plots.Bars(
        labels=[device.name for device in shown],
        parts={"measured peak": [(device.peak_bytes or 0) / size for device in shown]},
        marks=[device.predicted_bytes / size if device.predicted_bytes else None for device in shown],
        limits=[device.budget_bytes / size if device.budget_bytes else None for device in shown],
        notes=[f"{100 * _share(device):.0f} %" if device.budget_bytes else "" for device in shown],
        unit=unit,
    )
    return page.section(
        f"Peak memory of {run.memory_of}{' against its budget' if any(chart.limits) else ''}",
        page.image(plots.bars(chart), "peak memory, prediction and budget of each device"),
        _more(len(measured), "the nearest to their budgets,"),
        page.note(report_tables.SHARED_WORKERS) if run.folder is not None else "",
    )


def _share(device: DeviceRecord) -> float:
    return (device.peak_bytes or 0) / device.budget_bytes if device.budget_bytes else 0.0


def _traffic_of_devices(run: RunRecord) -> str:
    moved = [(d.name, d.bytes_up or 0, d.bytes_down or 0) for d in run.devices if d.bytes_up or d.bytes_down]
    if not moved:
        return ""
    shown = moved
    if len(shown) > plots.MAX_BARS:
        shown = sorted(moved, key=lambda row: -(row[1] + row[2]))[: plots.MAX_BARS]
    unit, size = plots.unit(max(up + down for _, up, down in shown))
    parts = {"up": [up / size for _, up, _ in shown], "down": [down / size for _, _, down in shown]}
    chart = plots.Bars(labels=[name for name, _, _ in shown], parts=parts, unit=unit)
    return page.section(
        "Bytes moved per device",
        page.image(plots.bars(chart), "bytes sent and received by each device"),
        _more(len(moved), "the highest"),
    )
