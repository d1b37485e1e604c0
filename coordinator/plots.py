"""The plots of a run's report, as PNG: results over the rounds, recall per class, bytes and memory per device.

The only module that loads matplotlib, by its object interface: no global state, no window system.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

__all__ = ["MAX_BARS", "Bars", "bars", "progress"]

MAX_BARS = 40  # more cannot be read
_MAX_THIN_LINES = 200
_MAX_LABEL = 22
_SIZE = (5.6, 3.2)  # inches: small, so that letters stay readable on a phone
_DPI = 180
_BLUE, _ORANGE, _GREY, _RED, _INK = "#2563eb", "#ea580c", "#94a3b8", "#dc2626", "#334155"
_STYLE: Any = {  # the names of settings are a type of their own in some versions
    "font.size": 9,
    "axes.edgecolor": "#cbd5e1",
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
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

Line = Sequence[tuple[int, float]]  # (round, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars: per label one value per part, stacked; `limits` are marked beside them."""

    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    limits: Sequence[float | None] = ()
    unit: str = ""
    highest: float | None = None  # end of the axis


def progress(fleet: Mapping[str, Line], devices: Sequence[Line], *, best: int | None) -> bytes:
    """Results of the whole fleet over the rounds as thick lines, each device's accuracy as a thin one."""
    with rc_context(_STYLE):
        figure, axes = _figure(_SIZE)
        for number, line in enumerate(devices[:_MAX_THIN_LINES]):
            label = "accuracy, each device" if number == 0 else None
            axes.plot(*_columns(line), color=_GREY, linewidth=0.8, alpha=0.55, label=label, zorder=2)
        for (name, line), colour in zip(fleet.items(), (_BLUE, _ORANGE), strict=False):
            axes.plot(*_columns(line), color=colour, linewidth=2.2, marker="o", markersize=3.2, label=name, zorder=3)
        if best is not None:
            axes.axvline(best, color=_INK, linewidth=1.0, linestyle=(0, (3, 3)), label="best version", zorder=1)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("after round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
        return _png(figure)


def bars(chart: Bars) -> bytes:
    """Bars from top to bottom in the order that is given; at most `MAX_BARS` of them."""
    labels = [_label(label) for label in chart.labels[:MAX_BARS]]
    places = range(len(labels))
    with rc_context(_STYLE):
        figure, axes = _figure((_SIZE[0], 1.0 + 0.26 * max(3, len(labels))))
        left = [0.0] * len(labels)
        for (name, values), colour in zip(chart.parts.items(), (_BLUE, _ORANGE), strict=False):
            axes.barh(places, values[: len(labels)], left=left, height=0.62, color=colour, label=name)
            left = [a + b for a, b in zip(left, values, strict=False)]
        _mark_limits(axes, chart.limits[: len(labels)])
        axes.set_yticks(places, labels, parse_math=False)  # a class may be called $x$
        axes.set_ylim(max(3, len(labels)) - 0.5, -0.5)
        axes.set_xlim(0, chart.highest)
        axes.set_xlabel(chart.unit)
        axes.grid(axis="y", visible=False)
        if len(chart.parts) > 1 or chart.limits:
            figure.legend(loc="outside lower center", ncols=3)
        return _png(figure)


def _mark_limits(axes: Axes, limits: Sequence[float | None]) -> None:
    known = [(place, limit) for place, limit in enumerate(limits) if limit is not None]
    places = [place for place, _ in known]
    ends = ([place - 0.42 for place in places], [place + 0.42 for place in places])
    if known:
        axes.vlines([limit for _, limit in known], *ends, color=_RED, linewidth=2.0, label="budget")


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _columns(line: Line) -> tuple[list[int], list[float]]:
    return [x for x, _ in line], [y for _, y in line]


def _label(text: str) -> str:
    """One short line."""
    plain = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return plain if len(plain) <= _MAX_LABEL else f"{plain[: _MAX_LABEL - 1]}…"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
