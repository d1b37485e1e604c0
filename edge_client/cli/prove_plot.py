"""The picture of `edge-client prove`: measured against predicted and budgeted memory of every case."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from edge_client.cli.prove_command import Proof

__all__ = ["draw"]

_STYLE: Any = {"font.size": 9, "axes.grid": True, "grid.color": "#e2e8f0", "axes.axisbelow": True}
_INSIDE, _ABOVE, _LINE = "#2563eb", "#dc2626", "#0f172a"
_MB = 1e6


def draw(proof: Proof) -> bytes:
    """Draw the picture and return it as a PNG."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 4.6), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, 2, sharey=True)
        measured = proof.measured
        least = min((one.measured_bytes for one in measured), default=_MB) / _MB
        most = max((one.budget_bytes for one in measured), default=_MB) / _MB
        for place, name in ((axes[0], "predicted"), (axes[1], "budget")):
            for is_above, colour in ((False, _INSIDE), (True, _ABOVE)):
                chosen = [one for one in measured if one.is_above == is_above]
                place.scatter(
                    [(one.predicted_bytes if name == "predicted" else one.budget_bytes) / _MB for one in chosen],
                    [one.measured_bytes / _MB for one in chosen],
                    s=12,
                    color=colour,
                    alpha=0.6,
                    linewidths=0,
                )
            place.plot([least, most], [least, most], color=_LINE, lw=1)
            place.set_xscale("log")
            place.set_yscale("log")
            place.set_xlabel(f"{name} MB")
            place.set_title(f"Nothing may be above its {'prediction' if name == 'predicted' else 'budget'}", loc="left")
        axes[0].set_ylabel("measured MB of training")
        figure.suptitle(
            f"{len(proof.outcomes)} cases over {len({one.case.architecture for one in proof.outcomes})} models, "
            f"{len(proof.above)} above",
            fontweight="bold",
        )
        out = io.BytesIO()
        figure.savefig(out, format="png")
    return out.getvalue()
