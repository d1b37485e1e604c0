"""Class means: how devices make and use them, and how the server joins them. What Felo, Velo, FedHe and FedProto share.

A device adds up features or logits per class while it trains its last epoch, in training mode, and sends the means of
the classes that it has. The server keeps the newest mean of each device and class, and sends the mean over devices.

    seen     a device has samples of the class: it sends their mean and their number
    absent   no device ever sent the class: there is no target, and samples of it take no part in the term
    away     the devices that sent it are not in this round: their last values stay, up to `max_age` rounds

Means of different widths (features of different architectures) are different tables: each joins only its like.
Does not cover: what is minimised with the targets (the method's file), which classes may leave a device (`privacy`).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields

import torch
from torch import Tensor

from edge_client.config.run_file import RunFile
from edge_client.device.accelerator import device_of
from edge_client.knowledge.kinds import ClassTable, one
from edge_client.methods.base import Header, LeftOut, Lesson, Received, Traffic
from edge_client.models.contract import Model
from edge_client.models.taps import flat_width, tapped
from edge_client.training.contract import Batch, Job

__all__ = [
    "TAPS",
    "ClassExchange",
    "ClassMeans",
    "ClassMemory",
    "ClassTeacher",
    "class_traffic",
    "device_number",
    "features_and_logits",
    "fold_tables",
]

_log = logging.getLogger(__name__)

TAPS = {"feature": "features", "logit": "logits"}  # a table's label -> where the model puts its values out


class ClassMeans:
    """Sums and counts per class, on the host; float64: microbatches change nothing that a float32 could show."""

    def __init__(self, num_classes: int, clip_norm: float | None = None) -> None:
        self._counts = torch.zeros(num_classes, dtype=torch.int64)
        self._sums: Tensor | None = None  # [C, width]
        self._clip = clip_norm

    def add(self, labels: Tensor, rows: Tensor) -> None:
        """One row per sample; with `clip_norm` none counts for more than that length."""
        labels, rows = labels.cpu(), rows.detach().cpu().flatten(1).to(torch.float64)
        if self._clip is not None:
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            rows = rows * (self._clip / norms.clamp(min=1e-12)).clamp(max=1.0)
        if self._sums is None:
            self._sums = torch.zeros(len(self._counts), rows.shape[1], dtype=torch.float64)
        self._sums.index_add_(0, labels, rows)
        self._counts += torch.bincount(labels, minlength=len(self._counts))

    def table(self, label: str) -> ClassTable | None:
        """The means of the classes that were there; none if nothing was."""
        present = self._counts > 0
        if self._sums is None or not bool(present.any()):
            return None
        values = (self._sums[present] / self._counts[present, None]).to(torch.float32)
        return ClassTable(label=label, counts=self._counts.clone(), values=values)


class ClassExchange:
    """A device's side: the targets that came, and the means that will go."""

    def __init__(self, job: Job, labels: Sequence[str]) -> None:
        num_classes, device = len(job.class_counts), device_of(job.model)
        self.means = {label: ClassMeans(num_classes, job.clip_norm) for label in labels}
        self._targets: dict[str, tuple[Tensor, Tensor]] = {}
        for label in labels:
            table = one(job.knowledge, ClassTable, label)
            if table is not None:
                values, present = table.targets()
                self._targets[label] = device.move(values), device.move(present)

    @property
    def empty(self) -> bool:
        """Whether no targets came, as in the first round."""
        return not self._targets

    def targets(self, label: str) -> tuple[Tensor, Tensor] | None:
        """Values by class and which classes have one, if anything came."""
        return self._targets.get(label)

    def target(self, label: str, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor, float] | None:
        """For each sample its class's target, and whether it has one; and how many of the whole batch have.

        None where nobody in the whole batch has one.
        """
        targets = self._targets.get(label)
        if targets is None:
            return None
        values, present = targets
        if values.shape[1] != rows.shape[1]:
            details = (label, values.shape[1], rows.shape[1])
            _log.warning("targets for %r have %d numbers, this model puts out %d; they are left out", *details)
            del self._targets[label]
            return None
        count = float(present[batch.whole_y].sum())
        return (values[batch.y].to(rows.dtype), present[batch.y].to(rows.dtype), count) if count else None

    def observe(self, batch: Batch, taps: Mapping[str, Tensor]) -> None:
        """Add up what the trained model puts out in the last epoch; earlier values are those of an older model."""
        if batch.last_epoch:
            for label, means in self.means.items():
                means.add(batch.y, taps[TAPS[label]])

    def tables(self) -> tuple[ClassTable, ...]:
        """The means that the device sends."""
        tables = (means.table(label) for label, means in self.means.items())
        return tuple(table for table in tables if table is not None)


def features_and_logits(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """[b, F] and [b, C] of one pass."""
    seen, logits = tapped(model, ["features"], x)
    return seen["features"].flatten(1), logits


def class_traffic(model: Model, labels: Sequence[str]) -> Traffic:
    """Means of all classes, both ways."""
    num_classes = math.prod(model.units[-1].out_shape)
    widths = {"feature": flat_width(model, "features") if "feature" in labels else 0, "logit": num_classes}
    counts = torch.empty(num_classes, dtype=torch.int64, device="meta")
    tables = tuple(
        ClassTable(label=label, counts=counts, values=torch.empty(num_classes, widths[label], device="meta"))
        for label in labels
    )
    return Traffic(up=tables, down=tables)


def device_number(device: str) -> int:
    """A device's name as an integer of 63 bits, to stand in a tensor."""
    return int.from_bytes(hashlib.sha256(device.encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassMemory:
    """The newest mean of each device and class, of one label and width; sorted by device, then class."""

    devices: Tensor  # [n] int64, as `device_number` makes them
    classes: Tensor  # [n] int64
    counts: Tensor  # [n] int64
    rounds: Tensor  # [n] int64: when it came
    values: Tensor  # [n, width]

    @classmethod
    def nothing(cls, width: int) -> ClassMemory:
        """Before the first round."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(devices=none, classes=none, counts=none, rounds=none, values=torch.empty(0, width))

    def merged(self, received: Iterable[tuple[str, ClassTable]], *, round: int) -> ClassMemory:
        """With the tables of a round, which replace older means of the same device and class."""
        rows = {(int(d), int(c)): (self, i) for i, (d, c) in enumerate(zip(self.devices, self.classes, strict=True))}
        for device, table in received:
            number, classes = device_number(device), table.classes
            new = ClassMemory(
                devices=torch.full_like(classes, number),
                classes=classes,
                counts=table.counts[classes],
                rounds=torch.full_like(classes, round),
                values=table.values.float(),
            )
            rows |= {(number, int(c)): (new, i) for i, c in enumerate(classes)}
        return self._stacked([rows[key] for key in sorted(rows)])

    def _stacked(self, rows: Sequence[tuple[ClassMemory, int]]) -> ClassMemory:
        if not rows:
            return self
        return ClassMemory(
            devices=torch.stack([memory.devices[i] for memory, i in rows]),
            classes=torch.stack([memory.classes[i] for memory, i in rows]),
            counts=torch.stack([memory.counts[i] for memory, i in rows]),
            rounds=torch.stack([memory.rounds[i] for memory, i in rows]),
            values=torch.stack([memory.values[i] for memory, i in rows]),
        )

    def since(self, round: int) -> ClassMemory:
        """Without what came before a round."""
        (rows,) = (self.rounds >= round).nonzero(as_tuple=True)
        return ClassMemory(
            devices=self.devices[rows],
            classes=self.classes[rows],
            counts=self.counts[rows],
            rounds=self.rounds[rows],
            values=self.values[rows],
        )

    def means(self, label: str, num_classes: int, *, by_count: bool = False) -> ClassTable | None:
        """The mean over devices of each class that any has, each device counting once, or as its samples are many.

        `counts` of the result: how many devices it is made of.
        """
        counts = torch.bincount(self.classes, minlength=num_classes)
        present = counts > 0
        if not bool(present.any()):
            return None
        weights = self.counts.double() if by_count else torch.ones(len(self.counts), dtype=torch.float64)
        sums = torch.zeros(num_classes, self.values.shape[1], dtype=torch.float64)
        sums.index_add_(0, self.classes, self.values.double() * weights[:, None])
        totals = torch.zeros(num_classes, dtype=torch.float64).index_add_(0, self.classes, weights)
        return ClassTable(label=label, counts=counts, values=(sums[present] / totals[present, None]).float())

    def tensors(self) -> dict[str, Tensor]:
        """For the server's state."""
        return {
            "devices": self.devices,
            "classes": self.classes,
            "counts": self.counts,
            "rounds": self.rounds,
            "values": self.values,
        }


def _group_of(table: ClassTable) -> str:
    """Tables that are averaged with each other, such as `feature/512`: those of one label and width."""
    return f"{table.label}/{table.width}"


def fold_tables(
    memory: Mapping[str, ClassMemory],
    received: Iterable[tuple[str, ClassTable]],
    *,
    round: int,
    max_age: int = 0,
) -> dict[str, ClassMemory]:
    """The server's memory by group after a round; `max_age` in rounds, 0: means never expire."""
    groups: dict[str, list[tuple[str, ClassTable]]] = {}
    for device, table in received:
        groups.setdefault(_group_of(table), []).append((device, table))
    folded = dict(memory)
    for group, tables in groups.items():
        width = tables[0][1].width
        folded[group] = folded.get(group, ClassMemory.nothing(width)).merged(tables, round=round)
    if max_age:
        folded = {group: table_memory.since(round - max_age) for group, table_memory in folded.items()}
    return folded


class ClassTeacher:
    """The server's side: the newest means of every device, and what they are on the average.

    Memory: `LABEL/WIDTH/...`, a `ClassMemory` each, and `width/SLICE`: how wide the features of an architecture are.
    """

    def __init__(self, *, by_count: bool = False, max_age: int = 0) -> None:
        self._by_count = by_count
        self._max_age = max_age

    def begin(self, run: RunFile) -> Mapping[str, Tensor]:
        """An empty memory."""
        return {}

    def learn(
        self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson, studied: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Replace the older means of the devices of this round."""
        tables = _tables(received)
        widths = _widths(memory, tables)
        folded = fold_tables(
            _groups(memory),
            ((header.device, table) for header, table in tables if _fits(header, table, widths)),
            round=lesson.round,
            max_age=self._max_age,
        )
        tensors = {
            f"{group}/{name}": t for group, group_memory in folded.items() for name, t in group_memory.tensors().items()
        }
        return {**tensors, **widths}

    def left_out(self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson) -> Sequence[LeftOut]:
        """Features of another width than those of most devices of the slice; classes without means of a device."""
        tables = _tables(received)
        widths = _widths(memory, tables)
        odd = [
            LeftOut(
                device=header.device,
                code="signature",
                detail=f"its features have {table.width} numbers, those of slice {header.slice!r} have "
                f"{int(widths[_WIDTH + header.slice])}; its class means of features are left out",
            )
            for header, table in tables
            if not _fits(header, table, widths)
        ]
        return [*odd, *_missing_classes(tables, lesson)]

    def study(self, memory: Mapping[str, Tensor], lesson: Lesson) -> Mapping[str, Tensor]:
        """Nothing takes long."""
        return {}

    def tell(self, memory: Mapping[str, Tensor], *, cut: str, device: str, lesson: Lesson) -> tuple[ClassTable, ...]:
        """The means of logits, and those of features as wide as this architecture's."""
        width = memory.get(_WIDTH + cut)
        groups = _groups(memory, width=None if width is None else int(width))
        means = (
            group_memory.means(group.partition("/")[0], lesson.num_classes, by_count=self._by_count)
            for group, group_memory in groups.items()
        )
        return tuple(table for table in means if table is not None)


_WIDTH = "width/"
_ALL = -1
_MAX_NAMED = 5
_Tables = Sequence[tuple[Header, ClassTable]]


def _tables(received: Received) -> _Tables:
    return [(header, item) for header, items in received() for item in items if isinstance(item, ClassTable)]


def _widths(memory: Mapping[str, Tensor], tables: _Tables) -> dict[str, Tensor]:
    """How wide the features of each slice are: in this round, or for slices without any in it, in an earlier one."""
    return {name: memory[name] for name in memory if name.startswith(_WIDTH)} | _usual_widths(tables)


def _fits(header: Header, table: ClassTable, widths: Mapping[str, Tensor]) -> bool:
    return table.label != "feature" or table.width == int(widths[_WIDTH + header.slice])


def _missing_classes(tables: _Tables, lesson: Lesson) -> Iterator[LeftOut]:
    """The classes that none of a device's tables has, for each device."""
    present: dict[str, set[int]] = {}
    for header, table in tables:
        present.setdefault(header.device, set()).update(table.classes.tolist())
    names = lesson.run.classes if lesson.run is not None else [str(number) for number in range(lesson.num_classes)]
    for device, classes in present.items():
        missing = [repr(name) for number, name in enumerate(names) if number not in classes]
        if missing:
            num_unnamed = len(missing) - _MAX_NAMED
            listed = ", ".join(missing[:_MAX_NAMED]) + (f" and {num_unnamed} more" if num_unnamed > 0 else "")
            detail = f"tells nothing of {len(missing)} of {len(names)} classes, having no or too few samples: {listed}"
            yield LeftOut(device=device, code="missing_class", detail=detail)


def _usual_widths(tables: _Tables) -> dict[str, Tensor]:
    """For each slice the width of the features of most of its devices; those of the others are left out."""
    widths: dict[str, list[int]] = {}
    for header, table in tables:
        if table.label == "feature":
            widths.setdefault(header.slice, []).append(table.width)
    return {
        _WIDTH + cut: torch.tensor(max(sorted(candidates), key=candidates.count)) for cut, candidates in widths.items()
    }


def _groups(memory: Mapping[str, Tensor], width: int | None = _ALL) -> dict[str, ClassMemory]:
    """All tables of a memory, or all of logits and the one of features of this width."""
    names = sorted({name.rpartition("/")[0] for name in memory if not name.startswith(_WIDTH)})
    groups = [name for name in names if width == _ALL or not name.startswith("feature/") or name == f"feature/{width}"]
    fields = [field.name for field in dataclass_fields(ClassMemory)]
    return {group: ClassMemory(**{name: memory[f"{group}/{name}"] for name in fields}) for group in groups}
