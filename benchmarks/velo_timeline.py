"""When Velo's server trains its CVAE, and whether a round waits for it: a real federation, its log, and a picture.

Three devices over MQTT. A study begins when a version is committed and is joined by the fold of the next round: on the
round's critical path is what that fold waited. Times are those of the coordinator's log; all processes share one clock.
Writes `results/velo_timeline.png` beside the JSON.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.federation import Federation, scratch
from benchmarks.figures import RESULTS, Figure
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table

__all__ = ["measure"]

_STUDY = re.compile(r"run \S+ round (\d+): a study .* took ([\d.]+) s from ([\d.]+) on, its fold waited ([\d.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Study:
    round: int
    began_s: float
    took_s: float
    waited_s: float


def measure(*, quick: bool) -> list[Figure]:
    """Seconds of studies, and those that a round waited."""
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, Federation(Path(folder)) as federation:
        federation.start()
        federation.start_devices(3, training=True)
        shown = federation.run(_run_file(3 if quick else 6))
        rounds, studies = federation.spans(shown.run), _studies(federation)
    trained = [study for study in studies if study.round > 1]  # before the first round nothing was known
    _draw(rounds, studies, RESULTS / f"velo_timeline{'.quick' if quick else ''}.png")
    overlap = tuple(_inside(study, rounds[study.round - 1]) / study.took_s for study in trained)
    return [
        Figure(name="study", unit="s", values=tuple(study.took_s for study in trained)),
        Figure(name="round", unit="s", values=tuple(end - begin for begin, end in rounds)),
        Figure(name="share of a study beside its round", unit="ratio", values=overlap, at_least=0.99),
        Figure(
            name="on the critical path: the fold waited",
            unit="s",
            values=(max(study.waited_s for study in trained),),
            at_most=0.005,  # of handing a finished result over
        ),
    ]


def _run_file(rounds: int) -> RunFile:
    table = {
        "name": "velo",
        "method": {"name": "velo"},
        "model": {"name": "mlp", "input": [1, 8, 8], "hidden": [256, 512]},
        "classes": [str(digit) for digit in range(10)],
        "train": {"batch": 32, "epochs": 3, "lr": 0.05},
        "stop": {"rounds": rounds},
        "devices": {"min": 3},
        "rounds": {"deadline": "20min"},
        "evaluate": {"every": 0},
    }
    return parse_table(RunFile, table, source="benchmark")


def _studies(federation: Federation) -> list[_Study]:
    found = (_STUDY.match(text) for _, text in federation.said("coordinator"))
    return [_Study(round=int(m[1]), took_s=float(m[2]), began_s=float(m[3]), waited_s=float(m[4])) for m in found if m]


def _inside(study: _Study, span: tuple[float, float]) -> float:
    """Seconds of a study between the first assignment of a round and its last update, up to the fold."""
    return max(0.0, min(study.began_s + study.took_s, span[1]) - max(study.began_s, span[0] - 0.5))


def _draw(rounds: list[tuple[float, float]], studies: list[_Study], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    start = rounds[0][0]
    figure, axes = pyplot.subplots(figsize=(9, 2.4), layout="constrained")
    for number, (begin, end) in enumerate(rounds, 1):
        axes.barh(1, end - begin, left=begin - start, color="#4c78a8", edgecolor="white")
        axes.text((begin + end) / 2 - start, 1, f"round {number}", ha="center", va="center", color="white", fontsize=8)
    for study in studies:
        axes.barh(0, study.took_s, left=study.began_s - start, color="#f58518", edgecolor="white")
        waited = study.began_s + study.took_s - study.waited_s - start
        axes.barh(0, study.waited_s, left=waited, color="#e45756")
    axes.set_yticks([0, 1], ["CVAE", "devices train"])
    axes.set_xlabel("seconds; red: a fold waits for the CVAE")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
