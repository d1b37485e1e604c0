"""Comparing simulations: runs that differ only in their seed become one row, with mean and spread.

Covers: which runs belong together, what differs between them, and the numbers of each row.
Does not cover: reading folders (`coordinator.results.run_folders`), how rows are written
(`coordinator.report.compare_formats`).

A run that is not finished is listed, but counts in no number. Of two runs with the same file and seed one counts.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.results.run_directory import flat
from coordinator.results.run_record import RunRecord, is_better
from edge_client.config.tables import to_table

__all__ = [
    "Comparison",
    "Group",
    "Grouping",
    "LeftOut",
    "Peak",
    "Reached",
    "Row",
    "Spread",
    "compare",
    "cumulative_bytes",
    "grouped",
    "summarize",
]

Settings = Mapping[str, Any]  # key of the run file, as `section.key` -> value

_NO_SETTING = ("name", "seed")  # a name changes nothing, and seeds are what is averaged over
_METHOD = "method.name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Finished runs that differ in their seed only."""

    settings: Settings  # the method, and what differs between groups
    runs: Sequence[RunRecord]  # by seed


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A run that no number comes from."""

    folder: str
    method: str
    seed: int
    num_rounds: int
    rounds_wanted: int
    same_as: str = ""  # the folder of the same run that counts; empty: it is not finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Runs by the settings that they share."""

    groups: Sequence[Group]
    differing: Sequence[str]  # the method, and the other keys that differ between groups
    same: Settings  # what all groups have in common
    left_out: Sequence[LeftOut]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A number over seeds; `sd` is the sample standard deviation (n - 1), None for one seed."""

    mean: float
    sd: float | None
    values: Sequence[float]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """The spread of the known values; None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        sd = statistics.stdev(known) if len(known) > 1 else None
        return cls(mean=statistics.fmean(known), sd=sd, values=known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """When the target was reached for the first time; means over the `num` seeds that reached it."""

    num: int
    rounds: float | None
    bytes: float | None  # up and down


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The highest memory of training, on the device that came nearest to its budget."""

    device: str
    seed: int
    peak_bytes: int
    budget_bytes: int | None

    @property
    def share(self) -> float | None:
        """The share of the budget that was used."""
        return self.peak_bytes / self.budget_bytes if self.budget_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A group in numbers."""

    settings: Settings
    seeds: Sequence[int]
    folders: Sequence[str]
    num_rounds: float
    last: Spread | None  # the metric after the last judged round
    best: Spread | None  # in each seed's best round
    worst_device: Spread | None  # accuracy of the device with the lowest, after the last round that devices judged
    per_architecture: Mapping[str, Spread]  # accuracy after the last judged round
    to_target: Reached | None
    bytes_up: float
    bytes_down: float
    peak: Peak | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `coordinator compare` shows."""

    metric: str
    target: float | None
    differing: Sequence[str]  # keys of the settings of rows
    same: Settings
    rows: Sequence[Row]
    left_out: Sequence[LeftOut]


def compare(runs: Sequence[RunRecord], *, metric: str = "accuracy", target: float | None = None) -> Comparison:
    """Compare runs; rows are in the order of their first runs."""
    grouping = grouped(runs)
    rows = [summarize(group, metric, target) for group in grouping.groups]
    return Comparison(
        metric=metric,
        target=target,
        differing=grouping.differing,
        same=grouping.same,
        rows=rows,
        left_out=grouping.left_out,
    )


# which runs belong together


def grouped(runs: Sequence[RunRecord]) -> Grouping:
    """Group runs by everything in their files but name and seed."""
    members: dict[str, dict[int, RunRecord]] = {}
    tables: dict[str, Settings] = {}
    left_out = []
    for run in runs:
        table = {key: value for key, value in flat(to_table(run.file)) if key not in _NO_SETTING}
        which = _key(table)
        twin = members.get(which, {}).get(run.file.seed)
        if run.state != "finished" or twin is not None:
            left_out.append(_left_out(run, twin))
        else:
            tables[which] = table
            members.setdefault(which, {})[run.file.seed] = run
    differing = _differing(list(tables.values()))
    groups = [
        Group(
            settings={key: tables[which][key] for key in differing if key in tables[which]},
            runs=[seeds[seed] for seed in sorted(seeds)],
        )
        for which, seeds in members.items()
    ]
    first = next(iter(tables.values()), {})
    same = {key: value for key, value in first.items() if key not in differing}
    return Grouping(groups=groups, differing=differing, same=same, left_out=left_out)


def _key(table: Settings) -> str:
    """A text that is equal for equal settings in any order, also for 1 and 1.0."""
    whole = {key: float(value) if type(value) is int else value for key, value in table.items()}
    return json.dumps(whole, sort_keys=True)


def _left_out(run: RunRecord, twin: RunRecord | None) -> LeftOut:
    return LeftOut(
        folder=str(run.folder),
        method=run.file.method.name,
        seed=run.file.seed,
        num_rounds=run.num_rounds,
        rounds_wanted=run.file.stop.rounds,
        same_as=str(twin.folder) if run.state == "finished" and twin is not None else "",
    )


def _differing(tables: Sequence[Settings]) -> list[str]:
    """The method, and the keys whose values differ between tables, in the order of a run file."""
    keys = dict.fromkeys(key for table in tables for key in table)
    sections = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    differ = [key for key in keys if key != _METHOD and any(table.get(key) != tables[0].get(key) for table in tables)]
    return [_METHOD, *sorted(differ, key=lambda key: sections.index(key.partition(".")[0]))]


# the numbers of a group


def summarize(group: Group, metric: str, target: float | None) -> Row:
    """Means and spreads over the seeds."""
    runs = group.runs
    return Row(
        settings=group.settings,
        seeds=[run.file.seed for run in runs],
        folders=[str(run.folder) for run in runs],
        num_rounds=statistics.fmean(run.num_rounds for run in runs),
        last=Spread.of(_last(run, metric) for run in runs),
        best=Spread.of(_best(run, metric) for run in runs),
        worst_device=Spread.of(_worst_device(run) for run in runs),
        per_architecture=_per_architecture(runs),
        to_target=_reached(runs, metric, target) if target is not None else None,
        bytes_up=statistics.fmean(sum(round_.bytes_up or 0 for round_ in run.rounds) for run in runs),
        bytes_down=statistics.fmean(sum(round_.bytes_down or 0 for round_ in run.rounds) for run in runs),
        peak=_peak(runs),
        seconds=statistics.fmean(sum(round_.seconds or 0.0 for round_ in run.rounds) for run in runs),
    )


def _values(run: RunRecord, metric: str) -> list[float]:
    """The values after each evaluated round; the model before the first round is not counted."""
    values = (record.value(metric) for record in run.rounds if record.number)
    return [value for value in values if value is not None]


def _last(run: RunRecord, metric: str) -> float | None:
    values = _values(run, metric)
    return values[-1] if values else None


def _best(run: RunRecord, metric: str) -> float | None:
    choose: Callable[..., float] = min if metric == "loss" else max
    values = _values(run, metric)
    return choose(values) if values else None


def _worst_device(run: RunRecord) -> float | None:
    accuracies = [record.per_device for record in run.rounds if record.per_device]
    return min(accuracies[-1].values()) if accuracies else None


def _per_architecture(runs: Sequence[RunRecord]) -> dict[str, Spread]:
    last = [rounds[-1].per_architecture for run in runs if (rounds := run.judged)]
    names = dict.fromkeys(name for accuracies in last for name in accuracies)
    spreads = {name: Spread.of(accuracies.get(name) for accuracies in last) for name in names}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _reached(runs: Sequence[RunRecord], metric: str, target: float) -> Reached:
    reached = [(run, first) for run in runs if (first := _first_at(run, metric, target)) is not None]
    return Reached(
        num=len(reached),
        rounds=statistics.fmean(first for _, first in reached) if reached else None,
        bytes=statistics.fmean(cumulative_bytes(run)[first] for run, first in reached) if reached else None,
    )


def _first_at(run: RunRecord, metric: str, target: float) -> int | None:
    """The first round after which the target was reached."""
    for record in run.rounds:
        value = record.value(metric)
        if record.number and value is not None and not is_better(metric, target, value):
            return record.number
    return None


def cumulative_bytes(run: RunRecord) -> dict[int, int]:
    """Round -> bytes that were moved up and down until its end."""
    bytes_of_rounds = ((record.bytes_up or 0) + (record.bytes_down or 0) for record in run.rounds)
    return dict(zip((record.number for record in run.rounds), itertools.accumulate(bytes_of_rounds), strict=True))


def _peak(runs: Sequence[RunRecord]) -> Peak | None:
    """The highest peak by share of the budget; by bytes where no device has one."""
    peaks = [
        Peak(device=d.name, seed=run.file.seed, peak_bytes=d.peak_bytes, budget_bytes=d.budget_bytes)
        for run in runs
        for d in run.devices
        if d.peak_bytes is not None
    ]
    return max(peaks, key=lambda peak: (peak.share or 0.0, peak.peak_bytes), default=None)
