"""The similarity of the devices' models, as it is stored and reported: what is compared when, what stays. No torch.

    round 1, every `evaluate.similarity` rounds, and round `stop.rounds`; 8 devices at most, of different sizes first

The record has the matrices of the first and of the newest compared round, the means of those between, and the features
of the newest: some 70 kB however long the run. A repeated comparison replaces the previous one of its round.
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
    """Linear CKA of every two devices; None where one of them has no such stage, or its output is constant."""

    name: str
    cka: tuple[Values, ...]

    @property
    def mean(self) -> float | None:
        """The mean over all pairs of different devices."""
        similarities = [self.cka[i][j] for i, j in itertools.combinations(range(len(self.cka)), 2)]
        known = [value for value in similarities if value is not None]
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
    """The aggregator's answer to a comparison."""

    comparison: Comparison
    labels: tuple[Count, ...] = ()  # class of each sample
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The mean similarity of two devices in a round, by stage."""

    round: Count
    stages: Mapping[str, Likeness] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """The similarities of a run."""

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
    """The reason why the models of this run are never compared; empty if they are."""
    if file.evaluate.similarity == 0:
        return "switched off by evaluate.similarity = 0"
    if not simulated and not methods.has_global_model(file.method.name, file.method.parameters):
        return f"the models of {file.method.name} never leave the devices; a simulation of the run compares them"
    has_test_set = simulated and file.task is None  # whoever judges, the test set is there
    if not has_test_set and not file.evaluate.on.startswith("npz:"):
        return 'the coordinator has no test data to compare them on: name some with evaluate.on = "npz:/PATH"'
    return ""


def architectures_first(devices: Sequence[Compared]) -> list[Compared]:
    """At most `MAX_DEVICES`: one of each architecture, then another of each, by name; in the order of architectures."""
    ordered = sorted(devices, key=lambda one: (_size(one.slice), one.device))
    groups = [list(same) for _, same in itertools.groupby(ordered, key=lambda one: architecture(one.slice))]
    in_turns = [one for turn in itertools.zip_longest(*groups) for one in turn if one is not None]
    chosen = {one.device for one in in_turns[:MAX_DEVICES]}
    return [one for one in ordered if one.device in chosen]


def _size(slice_name: str) -> tuple[bool, str]:
    """A sort key that puts the whole model first."""
    name = architecture(slice_name)
    return name != "full", name


def added(before: Similarity, findings: Findings) -> Similarity:
    """The record with one more comparison; of a round that is compared again, the newer one stays."""
    new = findings.comparison
    known = {stage.name: stage.mean for stage in new.stages}
    row = Means(round=new.round, stages={name: mean for name, mean in known.items() if mean is not None})
    earlier = tuple(means for means in before.means if means.round < new.round)
    first = before.first if before.first is not None and before.first.round < new.round else new
    return Similarity(first=first, last=new, means=(*earlier, row), labels=findings.labels, pictures=findings.pictures)


def failed(before: Similarity, round_: int, detail: str) -> Similarity:
    """The record after a comparison that failed."""
    return replace(before, problem=f"round {round_}: {detail}"[:500])


def setting_of(run_id: str) -> str:
    """The name of the store's setting that has the record of a run."""
    return f"similarity.{run_id}"


def text_of(similarity: Similarity) -> str:
    """The stored form: one line of JSON."""
    return json.dumps(to_map(similarity), separators=(",", ":"), allow_nan=False)


def parse(text: str, *, where: str = "similarity") -> Similarity:
    """The record in its stored form; empty text is an empty record. Raises `ValueError` or `PayloadError`."""
    return from_map(Similarity, json.loads(text), where=where) if text else Similarity()
