"""The picture of `edge-client bench`: peak memory against the budget, and the training time at each budget.

The only module of the SDK that loads matplotlib, which comes with the extra `coordinator`.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from edge_client.config.quantities import format_bytes

if TYPE_CHECKING:
    from edge_client.cli.bench_command import Bench, BudgetResult

__all__ = ["draw"]

_INK, _PALE, _GRID = "#334155", "#cbd5e1", "#e2e8f0"
_PREDICTED, _MEASURED, _BUDGET, _TIME, _OVER = "#bfdbfe", "#2563eb", "#0f172a", "#ea580c", "#dc2626"
_DPI = 150
_STYLE: Any = {
    "font.size": 9,
    "axes.edgecolor": _PALE,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": _GRID,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def draw(bench: Bench) -> bytes:
    """Draw the picture and return it as a PNG."""
    results = bench.results
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 1.7 + 0.62 * len(results)), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        memory, time = figure.subplots(1, 2, sharey=True, width_ratios=[2.4, 1])
        _memory(memory, bench)
        _time(time, bench)
        memory.set_yticks(range(len(results)), [_label(result) for result in results])
        memory.invert_yaxis()
        memory.tick_params(axis="y", length=0)
        time.tick_params(axis="y", length=0)
        run = bench.what.run
        title = f"Training {run.what} with {run.method.name}, batches of {run.train.batch}, on {bench.device}"
        figure.suptitle(title, fontsize=12, fontweight="bold")
        handles, names = memory.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=3)
        out = io.BytesIO()
        figure.savefig(out, format="png")
    return out.getvalue()


def _label(result: BudgetResult) -> str:
    """The label of a bar: the budget, and below it the plan."""
    done = result.plan.describe() if result.plan is not None else "nothing fits"
    return f"budget {format_bytes(result.budget_bytes)}\n{done}"


def _memory(axes: Axes, bench: Bench) -> None:
    results = bench.results
    scale = 1e6
    predicted = [result.plan.training_bytes / scale if result.plan is not None else 0 for result in results]
    measured = [result.measured.peak_bytes / scale if result.measured is not None else 0 for result in results]
    axes.barh(range(len(results)), predicted, height=0.62, color=_PREDICTED, label="predicted peak")
    axes.barh(range(len(results)), measured, height=0.34, color=_MEASURED, label="measured peak")
    for place, result in enumerate(results):
        budget = result.budget_bytes / scale
        axes.plot([budget, budget], [place - 0.4, place + 0.4], color=_BUDGET, lw=2, label="_" if place else "budget")
        over = result.measured is not None and result.measured.peak_bytes > result.budget_bytes
        end = max(budget, predicted[place], measured[place])
        axes.annotate(
            _prediction(result),
            (end, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_OVER if over else _INK,
        )
    axes.set_xlim(0, 1.35 * max(max(predicted), *(result.budget_bytes / scale for result in results)))
    axes.set_title("Memory: nothing may pass the black line", loc="left", fontsize=10)
    axes.set_xlabel(f"MB on top of the {format_bytes(bench.base_bytes)} of a worker that does not train yet")


def _prediction(result: BudgetResult) -> str:
    if result.measured is None:
        what, _, why = result.note.partition(": ")
        return what if result.plan is not None else why
    share = result.measured.peak_bytes / result.budget_bytes
    return f"{format_bytes(result.measured.peak_bytes)}, {100 * share:.0f} % of the budget"


def _time(axes: Axes, bench: Bench) -> None:
    times = [result.relative_time or 0 for result in bench.results]
    axes.barh(range(len(times)), times, height=0.34, color=_TIME)
    for place, time in enumerate(times):
        shown = f"{time:.2f} x" if time else "-"
        axes.annotate(shown, (time, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(1, color=_PALE, lw=1, zorder=0)
    axes.set_xlim(0, 1.3 * max(1.0, *times))
    axes.set_title("Time that is paid", loc="left", fontsize=10)
    axes.set_xlabel("of an epoch, against training\neverything at once")
