"""What came of the papers' relations: verdicts, curves, the tables of docs/explanation/science.md.

`python -m benchmarks.science_table` puts them into the page. Differences are taken seed by seed, and verdicts follow
from their signs alone, by a rule made before the runs:

    reproduced           the paper's sign for every seed, of three or more; of methods that should be about equal: a
                         mean difference of at most 0.015, the spread over seeds that the paper itself has
    contradicted         the other sign for every seed
    not at this scale    neither
    open                 fewer than three seeds
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import RESULTS
from benchmarks.science_groups import GROUPS, Group, Relation, Setting

__all__ = [
    "BLOCKS",
    "PAGE",
    "PICTURES",
    "judge",
    "main",
    "pictures",
    "recorded",
    "relations_table",
    "runs_table",
    "save",
    "verdict",
]

Json = dict[str, Any]
Runs = Mapping[str, Sequence[Mapping[str, Any]]]

_DOCS = Path(__file__).parents[1] / "docs"
PAGE = _DOCS / "explanation/science.md"
PICTURES = _DOCS / "pictures"
_ABOUT = 0.015
_SEEDS = 3  # that a verdict needs
_RELATIONS = (
    "| group | relation | in the paper | accuracies | difference, seeds | rounds to the second's | MB | verdict |",
    "|---|---|---|---|---|---|---|---|",
)
_RUNS = (
    "| group | run | accuracy | MB | accuracy of each architecture, in the end |",
    "|---|---|---|---|---|",
)


def main() -> int:
    """Write the tables into the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, made in BLOCKS.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{made()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    PAGE.write_text(text, encoding="utf-8")
    return 0


def relations_table() -> str:
    """A row for every relation, measured or not."""
    rows = list(_RELATIONS)
    for name, group in GROUPS.items():
        runs = _measured(name)
        rows += [_row(name, relation, runs) for relation in group.relations]
        rows += _alignment_rows(name, group, runs)
    return "\n".join(rows)


def runs_table() -> str:
    """A row for every run of the groups that were measured: mean and standard deviation over seeds."""
    rows = list(_RUNS)
    for name in GROUPS:
        for run, seeds in (_measured(name) or {}).items():
            found = [seed["accuracy"] for seed in seeds]
            size = _mean(seed["bytes"] for seed in seeds) / 1e6
            parts = _architectures([seed["accuracy_per_architecture"] for seed in seeds])
            rows.append(f"| {name} | {run} | {_told(found, '.3f')} | {size:.1f} | {parts} |")
    return "\n".join(rows)


def pictures() -> str:
    """Of every group that was measured."""
    drawn = [name for name in GROUPS if _measured(name) is not None]
    return "\n".join(f"![Accuracy over rounds: {name}](../pictures/science-{name}.png)" for name in drawn)


def _architectures(seeds: Sequence[Mapping[str, float]]) -> str:
    shared = [part for part in seeds[0] if all(part in seed for seed in seeds)]
    return ", ".join(f"`{part}` {_mean(seed[part] for seed in seeds):.3f}" for part in shared)


def _measured(name: str) -> Runs | None:
    path = RESULTS / f"science-{name}.json"
    runs: Runs | None = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else None
    return runs


def recorded(setting: Setting) -> dict[str, dict[int, Json]]:
    """Run -> seed -> what stands in the results of all groups with this setting."""
    found: dict[str, dict[int, Json]] = {}
    for path in sorted(RESULTS.glob("science-*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["setting"] == setting.to_map():
            for run, seeds in results["runs"].items():
                found.setdefault(run, {}).update({seed["seed"]: seed for seed in seeds})
    return found


def _row(name: str, relation: Relation, runs: Runs | None) -> str:
    of = "whole model: " if relation.whole else ""
    stated = f"| {name} | {of}{relation.better} {'~' if relation.about else '>'} {relation.worse} | {relation.source} |"
    if runs is None:
        return f"{stated}  |  |  |  | not run |"
    told, sides = verdict(relation, runs), (runs[relation.better], runs[relation.worse])
    ends = " / ".join(f"{_mean(_end(relation, run) for run in side):.3f}" for side in sides)
    sizes = " / ".join(f"{_mean(run['bytes'] for run in side) / 1e6:.1f}" for side in sides)
    reached = " / ".join("never" if rounds is None else f"{rounds:g}" for rounds in told.get("rounds", ()))
    return f"{stated} {ends} | {_difference(told['gains'])} | {reached} | {sizes} | {told['verdict']} |"


def _alignment_rows(name: str, group: Group, runs: Runs | None) -> Iterator[str]:
    """Whether devices that learn from one another's drafts see samples more and more alike, and more than alone."""
    if group.setting.public == 0:
        return
    stated = f"| {name} | alignment of D2 in DraftFed grows | DraftFed: drafts align | "
    more = f"| {name} | alignment of D2 in the end: DraftFed > Local | - | "
    if runs is None:
        yield from (f"{stated} |  |  |  | not run |", f"{more} |  |  |  | not run |")
        return
    first, last = (_aligned(runs, "DraftFed", place) for place in (0, -1))
    alone = _aligned(runs, "Local", -1)
    grown = [after - before for before, after in zip(first, last, strict=True)]
    above = [after - local for after, local in zip(last, alone, strict=True)]
    yield f"{stated}{_mean(last):.3f} / {_mean(first):.3f} | {_difference(grown)} |  |  | {judge(grown)} |"
    yield f"{more}{_mean(last):.3f} / {_mean(alone):.3f} | {_difference(above)} |  |  | {judge(above)} |"


def _aligned(runs: Runs, name: str, place: int) -> list[float]:
    """The first or the last measurement of each seed."""
    return [sorted(seed["alignment"].items(), key=lambda item: int(item[0]))[place][1] for seed in runs[name]]


def verdict(relation: Relation, runs: Runs) -> Json:
    """Differences seed by seed, and what they say."""
    pairs = list(zip(runs[relation.better], runs[relation.worse], strict=True))
    gains = [_end(relation, better) - _end(relation, worse) for better, worse in pairs]
    told = {"gains": gains, "mean": _mean(gains), "spread": _spread(gains)}
    rounds = {} if relation.whole else {"rounds": [_rounds(pairs, side) for side in (0, 1)]}
    return told | rounds | {"verdict": judge(gains, about=relation.about)}


def _end(relation: Relation, seed: Mapping[str, Any]) -> float:
    """How good a run was: over all sizes and its last evaluations, or the whole model in the last one."""
    if not relation.whole:
        return float(seed["accuracy"])
    sizes = seed["accuracy_per_architecture"]
    return float(sizes["full"] if "full" in sizes else _mean(sizes.values()))


def judge(gains: Sequence[float], *, about: bool = False) -> str:
    """By the rule above."""
    if len(gains) < _SEEDS:
        return "open"
    if abs(_mean(gains)) <= _ABOUT if about else all(gain > 0 for gain in gains):
        return "reproduced"
    return "contradicted" if not about and all(gain < 0 for gain in gains) else "not at this scale"


def _rounds(pairs: Sequence[Sequence[Mapping[str, Any]]], side: int) -> float | None:
    """Rounds until an evaluation is as good as the worse method in the end: median over seeds; None: one never is."""
    found = [_first(pair[side]["accuracy_per_round"], pair[1]["accuracy"]) for pair in pairs]
    known = [number for number in found if number is not None]
    return statistics.median(known) if len(known) == len(found) else None


def _first(accuracies: Sequence[float | None], target: float) -> int | None:
    reached = (number for number, value in _judged(accuracies) if value >= target)
    return next(reached, None)


def _judged(accuracies: Sequence[float | None]) -> Iterator[tuple[int, float]]:
    return ((number, value) for number, value in enumerate(accuracies, start=1) if value is not None)


def _difference(gains: Sequence[float]) -> str:
    return f"{_told(gains, '+.3f')}, {len(gains)}"


def _told(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation, of which one seed has none."""
    mean = format(_mean(values), form)
    return f"{mean} ± {_spread(values):.3f}" if len(values) > 1 else mean


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def save(name: str, data: Json) -> None:
    """The JSON file with its verdicts, and the curves."""
    from coordinator.report import plots

    RESULTS.mkdir(exist_ok=True)
    told = [
        {"better": relation.better, "worse": relation.worse, "source": relation.source, "whole": relation.whole}
        | verdict(relation, data["runs"])
        for relation in GROUPS[name].relations
    ]
    text = json.dumps({**data, "relations": told}, indent=1)
    (RESULTS / f"science-{name}.json").write_text(text + "\n", encoding="utf-8")
    curves = [
        plots.Curve(name=run, points=points, spread=spread)
        for run, seeds in data["runs"].items()
        for points, spread in [_curve(seeds)]
    ]
    title = f"{name}: accuracy, mean of {len(data['seeds'])} seeds, band: standard deviation"
    (PICTURES / f"science-{name}.png").write_bytes(plots.lines([plots.Panel(title=title, curves=curves)], x="round"))


def _curve(seeds: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[float, float]], list[float | None]]:
    """Mean and standard deviation over seeds wherever there was an evaluation."""
    lines = [dict(_judged(seed["accuracy_per_round"])) for seed in seeds]
    rounds = sorted(set.intersection(*map(set, lines)))
    values = [[line[number] for line in lines] for number in rounds]
    points = [(float(number), _mean(found)) for number, found in zip(rounds, values, strict=True)]
    return points, [_spread(found) if len(found) > 1 else None for found in values]


BLOCKS: Mapping[str, Callable[[], str]] = {"relations": relations_table, "pictures": pictures, "runs": runs_table}

if __name__ == "__main__":
    sys.exit(main())
