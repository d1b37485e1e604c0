"""How alike the devices' models are, as it is kept and reported: what is compared when, and what of it stays. No torch.

    round 1, every `evaluate.similarity` rounds, and round `stop.rounds`; 8 devices at most, of different sizes first

Kept are the matrices of the first and of the newest round that was looked at, the mean of each one between, and the
features of the newest: some 70 kB however long the run. A comparison that is made again replaces the one of its round.
Does not cover: comparing (`coordinator.aggregation.comparison`, in the aggregator), the figures
(`coordinator.report.similarity`).
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from edge_client.config.run_file import RunFile
from edge_client.methods import registry as methods
from edge_client.methods.slices import architecture
from edge_client.records import Between, Count, from_map, to_map

__all__ = [
    "MAX_DEVICES",
    "MAX_SAMPLES",
    "Compared",
    "Comparison",
    "Findings",
    "Means",
    "Picture",
    "Similarity",
    "Stage",
    "added",
    "architectures_first",
    "failed",
    "is_due",
    "parse",
    "setting_of",
    "text_of",
    "why_never",
]

MAX_DEVICES, MAX_SAMPLES = 8, 256

Likeness = Annotated[float, Between(-1e-6, 1 + 1e-6)]
Values = tuple[Likeness | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A device, and how much of the model it trained."""

    device: str
    slice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Linear CKA of each two devices; None where one of them has no such stage, or it says the same of all samples."""

    name: str
    cka: tuple[Values, ...]

    @property
    def mean(self) -> float | None:
        """Over all pairs of different devices."""
        found = [self.cka[i][j] for i, j in itertools.combinations(range(len(self.cka)), 2)]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The devices' models after their training in one round, on the same test samples."""

    round: Count
    num_samples: Count
    seconds: float = 0.0  # that it took
    devices: tuple[Compared, ...] = ()
    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Features of one model on those samples: principal components as float16 [num_samples, width] in base64."""

    name: str  # of a device, or `store.rows.SERVER`: of the global model
    slice: str
    width: Count
    features: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the aggregator answers."""

    comparison: Comparison
    labels: tuple[Count, ...] = ()  # class of each sample
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Of a round: stage -> mean similarity of two devices."""

    round: Count
    stages: Mapping[str, Likeness] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """All that is kept of a run."""

    first: Comparison | None = None
    last: Comparison | None = None
    means: tuple[Means, ...] = ()  # by round
    labels: tuple[Count, ...] = ()  # these and the pictures are of `last`
    pictures: tuple[Picture, ...] = ()
    problem: str = ""  # why the newest comparison could not be made


def is_due(file: RunFile, round_: int) -> bool:
    """Whether the models of this round are to be compared."""
    every = file.evaluate.similarity
    return every > 0 and (round_ in (1, file.stop.rounds) or round_ % every == 0)


def why_never(file: RunFile, *, simulated: bool) -> str:
    """Why the models of this run are not compared; empty if they are."""
    if file.evaluate.similarity == 0:
        return "switched off by evaluate.similarity = 0"
    if not simulated and not methods.has_global_model(file.method.name, file.method.parameters):
        return f"the models of {file.method.name} never leave the devices; a simulation of the run compares them"
    has_own = simulated and file.task is None  # whoever judges, the test set is there
    if not has_own and not file.evaluate.on.startswith("npz:"):
        return 'the coordinator has no test data to compare them on: name some with evaluate.on = "npz:/PATH"'
    return ""


def architectures_first(devices: Sequence[Compared]) -> list[Compared]:
    """At most `MAX_DEVICES`: one of each architecture, then another of each, by name; in the order of architectures."""
    ordered = sorted(devices, key=lambda one: (_size(one.slice), one.device))
    groups = [list(same) for _, same in itertools.groupby(ordered, key=lambda one: architecture(one.slice))]
    in_turns = [one for turn in itertools.zip_longest(*groups) for one in turn if one is not None]
    kept = {one.device for one in in_turns[:MAX_DEVICES]}
    return [one for one in ordered if one.device in kept]


def _size(cut: str) -> tuple[bool, str]:
    """The whole model first."""
    name = architecture(cut)
    return name != "full", name


def added(kept: Similarity, found: Findings) -> Similarity:
    """What is kept after one more comparison; of a round that is compared again, the newer one."""
    new = found.comparison
    known = {stage.name: stage.mean for stage in new.stages}
    row = Means(round=new.round, stages={name: mean for name, mean in known.items() if mean is not None})
    before = tuple(means for means in kept.means if means.round < new.round)
    first = kept.first if kept.first is not None and kept.first.round < new.round else new
    return Similarity(first=first, last=new, means=(*before, row), labels=found.labels, pictures=found.pictures)


def failed(kept: Similarity, round_: int, detail: str) -> Similarity:
    """What is kept after one that could not be made."""
    return replace(kept, problem=f"round {round_}: {detail}"[:500])


def setting_of(run_id: str) -> str:
    """The setting of the store that has it."""
    return f"similarity.{run_id}"


def text_of(similarity: Similarity) -> str:
    """As it is stored: one line of JSON."""
    return json.dumps(to_map(similarity), separators=(",", ":"), allow_nan=False)


def parse(text: str, *, where: str = "similarity") -> Similarity:
    """The other way round; nothing is nothing yet. Raises `ValueError` or `PayloadError`."""
    return from_map(Similarity, json.loads(text), where=where) if text else Similarity()
