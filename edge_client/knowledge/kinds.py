"""Knowledge: what methods exchange beside weights, or instead of them, as typed tables with exact sizes.

Covers: the records, their tensors in a container, and the check of every value that a peer sent. All failures of a
peer's values are `PayloadError`.
Does not cover: names, shapes and sizes in a container (`schema`), what a device's owner lets out (`privacy`), what
methods do with it (`methods`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from edge_client.errors import PayloadError
from edge_client.knowledge.schema import KNOWLEDGE_PREFIX, MAX_ABS, Limits, check_entries, kind_of
from edge_client.wire.container import Entry, codec_rule, tensor_bytes
from edge_client.wire.tensors import codec_for, decode, encode

__all__ = [
    "ClassTable",
    "DraftSet",
    "FeatureMaps",
    "FeaturePairs",
    "Knowledge",
    "PublicSamples",
    "SampleLogits",
    "as_read",
    "named_tensors",
    "one",
    "parse",
    "ranges_of",
]


class Knowledge(Protocol):
    """One table of knowledge."""

    @property
    def kind(self) -> str:
        """Its name in `schema.KINDS`."""

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their names below the kind, in the order in which they travel."""

    def nbytes(self, codec: str = "fp32") -> int:
        """Exact bytes of its tensors in a run with this codec."""


class _Sized:
    __slots__ = ()

    def nbytes(self: Knowledge, codec: str = "fp32") -> int:
        """Exact bytes of its tensors in a run with this codec."""
        return sum(
            tensor_bytes(codec_rule(tensor.ndim, codec, integer=not tensor.is_floating_point()), tensor.shape)
            for tensor in self.tensors().values()
        )


K = TypeVar("K", bound=Knowledge)

_MAX_DEPTH = 9999
_MAX_ID = 2**40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassTable(_Sized):
    """One mean per class, over the samples of that class that a device has."""

    label: str  # feature | logit
    counts: Tensor  # [C] int64: samples behind each class's mean, on the way down: devices; 0: the class is absent
    values: Tensor  # [n, width]: the means of the n present classes, in their order

    @property
    def kind(self) -> str:
        """`class/feature` or `class/logit`."""
        return f"class/{self.label}"

    @property
    def width(self) -> int:
        """Numbers per class."""
        return self.values.shape[1]

    @property
    def classes(self) -> Tensor:
        """[n] int64: the classes that have a mean."""
        return self.counts.nonzero()[:, 0]

    def only(self, allowed: Tensor) -> ClassTable | None:
        """The table of the `allowed` classes ([C] of bool) alone; None if it would be empty."""
        counts = torch.where(allowed, self.counts, 0)
        values = self.values[allowed[self.classes]]
        return ClassTable(label=self.label, counts=counts, values=values) if len(values) else None

    def tensors(self) -> dict[str, Tensor]:
        """Counts, values."""
        return {"counts": self.counts, "values": self.values}

    def targets(self) -> tuple[Tensor, Tensor]:
        """Values by class [C, width], zeros where absent; and which are present, [C] of 0 and 1."""
        values = self.values.new_zeros(len(self.counts), self.width)
        values[self.classes] = self.values
        return values, (self.counts > 0).to(self.values.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeaturePairs(_Sized):
    """Features of the same samples at two depths: what goes into a model's middle, and what comes out of it."""

    inputs: Tensor  # [n, *shape]
    outputs: Tensor  # [n, width]

    @property
    def kind(self) -> str:
        """`pairs`."""
        return "pairs"

    @property
    def signature(self) -> str:
        """Shapes of one sample, such as `64x8x8>512`: only devices with equal ones can use each other's pairs."""
        shapes = (self.inputs.shape[1:], self.outputs.shape[1:])
        return ">".join("x".join(str(dim) for dim in shape) for shape in shapes)

    def tensors(self) -> dict[str, Tensor]:
        """In, out."""
        return {"in": self.inputs, "out": self.outputs}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftSet(_Sized):
    """Outputs of a model for shared samples: of numbered convolutions, and logits; targets look the same."""

    ids: Tensor  # [n] int64: positions in the shared samples
    depths: Tensor  # [m] int64: how many convolutions this model has; on the way down: all models, ascending
    convs: Mapping[int, Tensor]  # its number -> [n, channels, *positions]; the first and the last at least
    logits: Tensor  # [n, K]

    @property
    def kind(self) -> str:
        """`drafts`."""
        return "drafts"

    @property
    def depth(self) -> int:
        """Number of the last convolution, l_c."""
        return max(self.convs)

    def tensors(self) -> dict[str, Tensor]:
        """Depths, ranges of ids, logits, convolutions in their order."""
        convs = {f"conv_{number}": self.convs[number] for number in sorted(self.convs)}
        return {"depths": self.depths, "ranges": ranges_of(self.ids), "logits": self.logits, **convs}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleLogits(_Sized):
    """Logits by sample."""

    ids: Tensor  # [n] int64
    values: Tensor  # [n, K]

    @property
    def kind(self) -> str:
        """`logits`."""
        return "logits"

    def tensors(self) -> dict[str, Tensor]:
        """Ranges of ids, values."""
        return {"ranges": ranges_of(self.ids), "values": self.values}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureMaps(_Sized):
    """Outputs of the lower part of a model for a device's samples, with labels and the device's logits."""

    ids: Tensor  # [n] int64: positions among the device's samples
    labels: Tensor  # [n] int64
    logits: Tensor  # [n, C]
    values: Tensor  # [n, *shape]

    @property
    def kind(self) -> str:
        """`maps`."""
        return "maps"

    def tensors(self) -> dict[str, Tensor]:
        """Ranges of ids, labels, logits, values."""
        return {
            "ranges": ranges_of(self.ids),
            "labels": self.labels,
            "logits": self.logits,
            "values": self.values,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublicSamples(_Sized):
    """Unlabelled samples that all devices have; a row's position is its id."""

    values: Tensor  # [n, *input_shape]

    @property
    def kind(self) -> str:
        """`public`."""
        return "public"

    def tensors(self) -> dict[str, Tensor]:
        """Values."""
        return {"values": self.values}


def ranges_of(ids: Tensor) -> Tensor:
    """Ascending ids as they travel: [m, 2], the first of each run of consecutive ones and how many they are."""
    breaks = (ids[1:] != ids[:-1] + 1).nonzero()[:, 0] + 1
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), breaks))
    ends = torch.cat((breaks, torch.tensor([len(ids)])))
    return torch.stack((ids[starts], ends - starts), dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReceivedTable:
    """The tensors of one kind as they came from a peer; each method checks one and returns it."""

    kind: str
    source: str
    limits: Limits
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def integers(self, name: str, low: int, high: int) -> Tensor:
        """An integer tensor whose values are in low..high."""
        value = self.tensors[name]
        if not low <= int(value.min()) <= int(value.max()) <= high:
            raise PayloadError("range", f"{self.source}: {name!r} of its {self.kind!r} is outside of {low} to {high}")
        return value

    def distinct(self, name: str, high: int) -> Tensor:
        """Ascending integers, none twice."""
        value = self.integers(name, 0, high)
        if bool((value[1:] <= value[:-1]).any()):
            raise PayloadError("range", f"{self.source}: {name!r} of its {self.kind!r} does not ascend")
        return value

    def ids(self, count: int) -> Tensor:
        """The ids of `count` rows, ascending; the sizes of the ranges are added up before memory is taken for them."""
        ranges = self.integers("ranges", 0, _MAX_ID)
        firsts, counts = ranges[:, 0], ranges[:, 1]
        if int(counts.min()) < 1 or int(counts.sum()) != count or bool((firsts[1:] < (firsts + counts)[:-1]).any()):
            raise PayloadError("range", f"{self.source}: the ranges of its {self.kind!r} are not those of {count} rows")
        offsets = torch.arange(count) - torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
        return torch.repeat_interleave(firsts, counts) + offsets

    def numbers(self, name: str) -> Tensor:
        """Finite values of a plausible size."""
        value = self.tensors[name]
        largest = max(abs(float(end)) for end in torch.aminmax(value))  # without a copy of the tensor
        if not largest <= MAX_ABS:  # NaN compares as false
            code = "range" if MAX_ABS < largest < float("inf") else "not_finite"
            raise PayloadError(
                code, f"{self.source}: {name!r} of its {self.kind!r} has values beyond {MAX_ABS:g}, or not finite"
            )
        return value


def _class_table(table: _ReceivedTable) -> ClassTable:
    counts, limits = table.integers("counts", 0, table.limits.max_count), table.limits
    present = counts[counts > 0]
    if len(present) != len(table.tensors["values"]):
        raise PayloadError(
            "shape",
            f"{table.source}: its {table.kind!r} counts {len(present)} classes, and has values of "
            f"{len(table.tensors['values'])}",
        )
    if int(present.min()) < limits.min_count:
        raise PayloadError(
            "range",
            f"{table.source}: its {table.kind!r} has a mean of {int(present.min())} samples, expected "
            f"{limits.min_count} at least",
        )
    return ClassTable(label=table.kind.removeprefix("class/"), counts=counts, values=table.numbers("values"))


def _pairs(table: _ReceivedTable) -> FeaturePairs:
    return FeaturePairs(inputs=table.numbers("in"), outputs=table.numbers("out"))


def _drafts(table: _ReceivedTable) -> DraftSet:
    convs = {int(name[5:]): table.numbers(name) for name in table.tensors if name.startswith("conv_")}
    if 1 not in convs:
        raise PayloadError("names", f"{table.source}: its drafts have no 'conv_1'")
    depths = table.distinct("depths", _MAX_DEPTH)
    logits = table.numbers("logits")
    return DraftSet(ids=table.ids(len(logits)), depths=depths, convs=convs, logits=logits)


def _logits(table: _ReceivedTable) -> SampleLogits:
    values = table.numbers("values")
    return SampleLogits(ids=table.ids(len(values)), values=values)


def _maps(table: _ReceivedTable) -> FeatureMaps:
    return FeatureMaps(
        ids=table.ids(len(table.tensors["labels"])),
        labels=table.integers("labels", 0, table.limits.num_classes - 1),
        logits=table.numbers("logits"),
        values=table.numbers("values"),
    )


def _public(table: _ReceivedTable) -> PublicSamples:
    return PublicSamples(values=table.numbers("values"))


_PARSERS: Mapping[str, Callable[[_ReceivedTable], Knowledge]] = {
    "class/feature": _class_table,
    "class/logit": _class_table,
    "pairs": _pairs,
    "drafts": _drafts,
    "logits": _logits,
    "maps": _maps,
    "public": _public,
}


def parse(
    entries: Sequence[Entry], read: Callable[[Entry], Tensor], limits: Limits, *, codec: str, source: str
) -> tuple[Knowledge, ...]:
    """The knowledge of a container; `read` is called only after the whole table was checked against `limits`."""
    check_entries(entries, limits, codec=codec, source=source)
    groups: dict[str, _ReceivedTable] = {}
    for entry in entries:
        kind, name = kind_of(entry.name)
        group = groups.setdefault(kind, _ReceivedTable(kind=kind, source=source, limits=limits))
        group.tensors[name] = read(entry)
    return tuple(_PARSERS[kind](group) for kind, group in groups.items())


def named_tensors(items: Iterable[Knowledge]) -> list[tuple[str, Tensor]]:
    """All tensors with their names in a container; each kind may be there once."""
    named = [
        (f"{KNOWLEDGE_PREFIX}{item.kind}/{name}", tensor) for item in items for name, tensor in item.tensors().items()
    ]
    if len({name for name, _ in named}) != len(named):
        raise ValueError(f"expected each kind of knowledge once, got {sorted(name for name, _ in named)}")
    return named


def as_read(items: Iterable[Knowledge], limits: Limits, *, codec: str, source: str) -> tuple[Knowledge, ...]:
    """What a peer reads from `items` in a run with this codec; raises the `PayloadError` with which it refuses them."""
    named = dict(named_tensors(items))
    codecs = {name: codec_for(tensor, codec) for name, tensor in named.items()}

    def read(entry: Entry) -> Tensor:
        value = named[entry.name]
        return value if entry.codec in ("fp32", "i64") else decode(encode(value, entry.codec), entry.codec, entry.shape)

    entries = [
        Entry(name, codecs[name], tuple(tensor.shape), 0, tensor_bytes(codecs[name], tensor.shape))
        for name, tensor in named.items()
    ]
    return parse(entries, read, limits, codec=codec, source=source)


def one(items: Iterable[Knowledge], kind: type[K], label: str = "") -> K | None:
    """The table of this type, and of this label if it has one; None if there is none."""
    for item in items:
        if isinstance(item, kind) and label in ("", getattr(item, "label", "")):
            return item
    return None
