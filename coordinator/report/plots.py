"""The plots of reports, as PNG: lines over rounds or bytes, bars with limits, heat maps, clouds of points.

The only module that loads matplotlib, by its object interface: no global state, no window system.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

__all__ = [
    "MAX_BARS",
    "MAX_CURVES",
    "MAX_KINDS",
    "Bars",
    "Cloud",
    "Curve",
    "HeatMap",
    "Line",
    "Panel",
    "bars",
    "bytes_panel",
    "clouds",
    "heat_maps",
    "lines",
    "unit",
]

MAX_BARS, MAX_CURVES = 40, 12  # more cannot be read; the caller chooses which
_MAX_THIN_LINES = 200
_MAX_MARKED = 20  # points of a curve; of more only the line is seen
_MAX_LABEL = 22
_MAX_NAME = 44  # in a legend
_SIZE = (5.6, 3.2)  # inches: small, so that letters stay readable on a phone
_DPI = 180
_GREY, _RED, _INK, _PALE = "#94a3b8", "#dc2626", "#334155", "#cbd5e1"
_COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#0891b2", "#be123c", "#a16207", "#64748b")
_DASHES = ("solid", (0, (5, 2)), (0, (1.2, 1.6)))  # more curves than colours begin again, dashed
_KINDS = (*_COLOURS, "#111827", "#f59e0b")  # of points, each with a marker: they differ without colours, too
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
MAX_KINDS = len(_KINDS)
_WIDE = 7.6  # inches: plots that have a row of the page for themselves
_HEAT = "Blues"  # gets darker evenly, so that it says the same in grey
_DARK = 0.55  # of the scale: from here on letters are white
_STYLE: Any = {  # the names of settings are a type of their own in some versions
    "font.size": 9,
    "axes.edgecolor": _PALE,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 9,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

Line = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line; `spread` is how far the band around each of its points goes up and down."""

    name: str
    points: Line
    spread: Sequence[float | None] = ()
    is_reference: bool = False  # what the others are compared with: black, dashed, above them


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes; equal names have equal colours in all panels of a plot."""

    curves: Sequence[Curve]
    y: str = ""
    title: str = ""
    thin: Sequence[Line] = ()  # behind the curves
    thin_name: str = ""
    marked_x: float | None = None
    marked_name: str = ""
    limits: tuple[float, float] | None = None  # of y; None: what the curves need
    highest: float | None = None  # that y can be


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars: per label one value per part, stacked; limits and marks stand on them, notes beside them."""

    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    limits: Sequence[float | None] = ()
    limit_name: str = "budget"
    marks: Sequence[float | None] = ()
    mark_name: str = "predicted"
    notes: Sequence[str] = ()
    unit: str = ""
    highest: float | None = None  # end of the axis


def lines(panels: Sequence[Panel], *, x: str, whole: bool = True) -> bytes:
    """Panels one below the other over the same x, whose ticks are whole numbers if `whole`; one legend for all."""
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    places = {name: number for number, name in enumerate(names)}
    with rc_context(_STYLE):
        height = _SIZE[1] if len(panels) == 1 else 0.7 + 2.1 * len(panels)
        figure = _figure((_SIZE[0], height))
        all_axes: list[Axes] = list(figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0])
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw(axes, panel, places)
        all_axes[-1].set_xlabel(x)
        if whole:
            all_axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=(1, 2, 5, 10), min_n_ticks=1))
        _legend(figure, all_axes)
        return _png(figure)


def _draw(axes: Axes, panel: Panel, places: Mapping[str, int]) -> None:
    for number, line in enumerate(panel.thin[:_MAX_THIN_LINES]):
        name = panel.thin_name if number == 0 else None
        axes.plot(*_columns(line), color=_GREY, linewidth=0.8, alpha=0.55, label=name, zorder=2)
    for curve in panel.curves:
        _draw_curve(axes, curve, places[curve.name])
    if panel.marked_x is not None:
        dashed = (0, (3, 3))
        axes.axvline(panel.marked_x, color=_INK, linewidth=1.0, linestyle=dashed, label=panel.marked_name, zorder=1)
    axes.set_ylabel(panel.y)
    axes.set_title(panel.title, loc="left", parse_math=False)
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    elif panel.highest is not None:
        axes.set_ylim(top=min(axes.get_ylim()[1], panel.highest))


def _draw_curve(axes: Axes, curve: Curve, place: int) -> None:
    colour = _INK if curve.is_reference else _COLOURS[place % len(_COLOURS)]
    dash = _DASHES[1] if curve.is_reference else _DASHES[place // len(_COLOURS) % len(_DASHES)]
    xs, ys = _columns(curve.points)
    known = [(x, y, s) for (x, y), s in zip(curve.points, curve.spread, strict=False) if s is not None]
    if known:
        lower, upper = [y - s for _, y, s in known], [y + s for _, y, s in known]
        axes.fill_between([x for x, _, _ in known], lower, upper, color=colour, alpha=0.18, linewidth=0, zorder=2)
    marker = "o" if len(xs) <= _MAX_MARKED and not (curve.is_reference and len(xs) > 1) else None
    width = 1.2 if curve.is_reference else 2.0
    name = _short(curve.name, _MAX_NAME)
    line: Any = {"color": colour, "linestyle": dash, "linewidth": width, "marker": marker, "markersize": 3.0}
    axes.plot(xs, ys, **line, label=name, zorder=3)


def _legend(figure: Figure, all_axes: Sequence[Axes], *, first: Iterable[str] = ()) -> None:
    """A legend with each name once, `first` before the others; none for a plot of one thing."""
    handles: dict[str, Artist] = {}
    for axes in all_axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if len(handles) > 1:
        longest = max(map(len, handles))
        names = [*(name for name in first if name in handles), *(name for name in handles if name not in set(first))]
        legend = figure.legend(
            [handles[name] for name in names],
            names,
            loc="outside lower center",
            ncols=1 if longest > 30 else 2 if longest > 22 else 3,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)


def bars(chart: Bars) -> bytes:
    """Bars from top to bottom, in the order of their labels."""
    labels = [_short(label, _MAX_LABEL) for label in chart.labels]
    places = range(len(labels))
    with rc_context(_STYLE):
        figure = _figure((_SIZE[0], 1.0 + 0.26 * max(3, len(labels))))
        axes = figure.add_subplot()
        left = [0.0] * len(labels)
        for (name, values), colour in zip(chart.parts.items(), _COLOURS, strict=False):
            axes.barh(places, values, left=left, height=0.62, color=colour, label=name)
            left = [a + b for a, b in zip(left, values, strict=True)]
        _mark(axes, chart.marks, _INK, chart.mark_name, half=0.24)
        _mark(axes, chart.limits, _RED, chart.limit_name, half=0.42)
        axes.set_yticks(places, labels, parse_math=False)  # a class may be called $x$
        axes.set_ylim(max(3, len(labels)) - 0.5, -0.5)
        axes.set_xlim(0, chart.highest)
        axes.set_xlabel(chart.unit)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        over = [limit is not None and end > limit for end, limit in zip(left, chart.limits, strict=False)]
        _note(axes, chart.notes, over)
        _legend(figure, [axes], first=chart.parts)
        return _png(figure)


def _mark(axes: Axes, values: Sequence[float | None], colour: str, name: str, *, half: float) -> None:
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    ends = ([place - half for place, _ in known], [place + half for place, _ in known])
    if known:
        axes.vlines([value for _, value in known], *ends, color=colour, linewidth=2.0, label=name, zorder=4)


def _note(axes: Axes, notes: Sequence[str], over: Sequence[bool]) -> None:
    """Texts at the right end, like a second axis; red where a bar is longer than its limit."""
    if any(notes):
        beside = axes.twinx()
        beside.set_ylim(*axes.get_ylim())
        beside.set_yticks(range(len(notes)), notes, parse_math=False)
        beside.tick_params(length=0, labelsize=8)
        beside.grid(visible=False)
        for label, is_over in zip(beside.get_yticklabels(), over, strict=False):
            label.set(color=_RED if is_over else _INK, fontweight="bold" if is_over else "normal")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A square of values from 0 to 1; None where a value is missing."""

    title: str
    values: Sequence[Sequence[float | None]]


def heat_maps(maps: Sequence[HeatMap], labels: Sequence[str]) -> bytes:
    """Square maps beside each other; their rows and columns are the labels, numbered, and named at the left."""
    count = len(labels)
    columns = min(len(maps), 2 if count > 4 else 3)
    rows = math.ceil(len(maps) / columns)
    with rc_context({**_STYLE, "axes.grid": False}):
        side = (_WIDE - 1.9) / max(2, columns)
        figure = _figure((_WIDE if columns > 1 else 0.6 * _WIDE, (side + 0.45) * rows + 0.25), pad=0.08)
        all_axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
        for number, axes in enumerate(all_axes):
            if number >= len(maps):
                axes.set_axis_off()
                continue
            image = _draw_heat(axes, maps[number])
            axes.set_xticks(range(count), [str(place) for place in range(1, count + 1)])
            named = [f"{_short(label, 30)} ({place})" for place, label in enumerate(labels, start=1)]
            axes.set_yticks(range(count), named if number % columns == 0 else [], parse_math=False)
            axes.tick_params(length=0, labelsize=7)
        bar = figure.colorbar(image, ax=all_axes, shrink=0.6, aspect=24, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label("linear CKA", size=7)
        bar.ax.tick_params(labelsize=7, length=0)
        return _png(figure)


def _draw_heat(axes: Axes, heat_map: HeatMap) -> AxesImage:
    values = [[math.nan if value is None else value for value in row] for row in heat_map.values]
    shades = colormaps[_HEAT].with_extremes(bad="#e2e8f0")
    image = axes.imshow(values, cmap=shades, vmin=0.0, vmax=1.0, interpolation="nearest")
    for y, row in enumerate(heat_map.values):
        for x, value in enumerate(row):
            shown = "-" if value is None else f"{value:.2f}"
            colour = "white" if value is not None and value > _DARK else _INK
            axes.text(x, y, shown, ha="center", va="center", fontsize=6.5, color=colour)
    axes.set_title(heat_map.title, parse_math=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """A scatter plot of points, each of a kind."""

    title: str
    points: Line
    kinds: Sequence[int]  # places in the names; others are grey


def clouds(pictures: Sequence[Cloud], names: Sequence[str]) -> bytes:
    """Clouds beside each other; the first `MAX_KINDS` names have a colour and a marker each."""
    shown = names[:MAX_KINDS]
    with rc_context({**_STYLE, "axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}):
        side = _WIDE / max(2, len(pictures))
        columns = 5 if max(map(len, shown), default=0) <= 12 else 3
        figure = _figure((_WIDE, side + 0.35 + 0.2 * math.ceil((len(shown) + 1) / columns)), pad=0.08)
        all_axes: list[Axes] = list(figure.subplots(1, len(pictures), squeeze=False)[0])
        for axes, cloud in zip(all_axes, pictures, strict=True):
            others = [point for point, kind in zip(cloud.points, cloud.kinds, strict=True) if kind >= len(shown)]
            if others:
                axes.scatter(*_columns(others), s=7, color=_PALE, linewidths=0, label="other classes")
            for kind, name in enumerate(shown):
                points = [point for point, its in zip(cloud.points, cloud.kinds, strict=True) if its == kind]
                label = _short(name, _MAX_LABEL)
                axes.scatter(
                    *_columns(points), s=11, color=_KINDS[kind], marker=_MARKERS[kind], linewidths=0, label=label
                )
            axes.set_title(_short(cloud.title, _MAX_NAME), parse_math=False)
            axes.set(xticks=[], yticks=[], box_aspect=1)
        handles, texts = all_axes[0].get_legend_handles_labels()  # not by name: two long ones may be cut to the same
        legend = figure.legend(handles, texts, loc="outside lower center", ncols=columns)
        for text in legend.get_texts():
            text.set_parse_math(False)
        return _png(figure)


def unit(highest: float) -> tuple[str, int]:
    """The unit of an axis up to so many bytes, and its size."""
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
    return next(((name, size) for name, size in units if highest >= size), ("bytes", 1))


def bytes_panel(curves: Sequence[Curve], title: str) -> Panel:
    """Curves of bytes from 0 on, in the unit that fits them."""
    highest = max((y for curve in curves for _, y in curve.points), default=0.0)
    name, size = unit(highest)
    scaled = [
        replace(
            curve,
            points=[(x, y / size) for x, y in curve.points],
            spread=[spread / size if spread is not None else None for spread in curve.spread],
        )
        for curve in curves
    ]
    return Panel(curves=scaled, y=name, title=title, limits=(0, max(highest / size, 1e-9) * 1.08))


def _figure(size: tuple[float, float], *, pad: float = 0.04) -> Figure:
    """`pad`: room at the edges and between plots, in inches."""
    figure = Figure(figsize=size, dpi=_DPI, layout=ConstrainedLayoutEngine(h_pad=pad))
    FigureCanvasAgg(figure)
    return figure


def _columns(line: Line) -> tuple[list[float], list[float]]:
    return [x for x, _ in line], [y for _, y in line]


def _short(text: str, longest: int) -> str:
    """One short line; a long text keeps its begin and its end, where names of devices differ."""
    plain = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    tail = longest // 2
    return plain if len(plain) <= longest else f"{plain[: longest - 1 - tail]}…{plain[-tail:]}"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
