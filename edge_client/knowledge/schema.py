"""What knowledge looks like in a container: names, shapes, codecs and sizes, checked without torch.

    knowledge/class/feature/   counts [C], values [n, F]                   means of the n present classes
    knowledge/class/logit/     counts [C], values [n, C]
    knowledge/pairs/           in [n, ...], out [n, F]                     one sample's features at two depths
    knowledge/drafts/          depths [d], ranges [m, 2], logits [n, K],   outputs for shared samples
                               conv_<k> [n, channels, up to three axes]
    knowledge/logits/          ranges [m, 2], values [n, K]                logits by sample
    knowledge/maps/            ranges [m, 2], labels [n], logits [n, C], values [n, ...]
    knowledge/public/          values [n, ...]                             the shared samples themselves

Ranges are the ids of samples: the first of each run of consecutive ones, and how many. Each kind comes once at most.
Integers travel as i64, all others with the run's codec, so that the bytes of knowledge on the wire are those of its
tensors, and a row of the container's table for each.
Covers: everything that follows from the table of a container, before a byte of data is read. Does not cover: the values
(`kinds`), which kinds a method sends (`methods`), whether a device may (`privacy`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edge_client.errors import PayloadError
from edge_client.wire.container import Entry, codec_rule

__all__ = [
    "CLASS_KINDS",
    "HELD_BACK",
    "KINDS",
    "KNOWLEDGE_PART",
    "KNOWLEDGE_PREFIX",
    "MAX_ABS",
    "MIN_COUNT_FLOOR",
    "PUBLIC_PART",
    "SAMPLE_KINDS",
    "KnowledgeRules",
    "Limits",
    "check_entries",
    "kind_of",
]

KNOWLEDGE_PREFIX = "knowledge/"
KNOWLEDGE_PART = "knowledge:"  # what the key of an assignment's part begins with that tells a device something
PUBLIC_PART = "public"  # the part with shared samples
HELD_BACK = "x-held-back"  # in the meta of an update: why knowledge is not in it
CLASS_KINDS = ("class/feature", "class/logit")
SAMPLE_KINDS = ("pairs", "drafts", "logits", "maps")  # a row is one sample's
KINDS = (*CLASS_KINDS, *SAMPLE_KINDS, "public")
MIN_COUNT_FLOOR = 10  # samples behind a class mean that leaves a device, whatever its owner wrote
MAX_ABS = 1e6  # of a value: a finite one near the largest float32 would still drown every mean

_INTEGERS = frozenset({"counts", "depths", "labels", "ranges"})
_NOT_ROWS = frozenset({"counts", "depths", "ranges"})
_LISTS = frozenset({"depths", "ranges"})
_VECTORS = frozenset({("class/feature", "values"), ("class/logit", "values"), ("pairs", "out"), ("logits", "values")})
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "class/feature": ("counts", "values"),
    "class/logit": ("counts", "values"),
    "pairs": ("in", "out"),
    "drafts": ("depths", "ranges", "logits"),
    "logits": ("ranges", "values"),
    "maps": ("ranges", "labels", "logits", "values"),
    "public": ("values",),
}
_CONV = re.compile(r"conv_[1-9][0-9]{0,3}")
_DRAFT_DIMS = 5  # rows, channels and at most three axes: what can be resized


@dataclass(frozen=True, slots=True, kw_only=True)
class KnowledgeRules:
    """The rules of a method for the knowledge that its devices send."""

    kinds: tuple[str, ...]  # that a device sends
    public: bool = False  # whether devices get the samples in the memory's `public`, once
    studies: bool = False  # whether the server makes something beside the round
    per_device: bool = False  # whether each device gets other knowledge; otherwise each architecture
    max_rows: int = 0  # samples in one table; class tables have a row per class
    max_bytes: int = 64 * 2**20  # of what a device sends in a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of knowledge in a run; a peer's container is checked against them before anything is allocated."""

    num_classes: int
    max_rows: int  # samples in one table
    max_bytes: int  # of all knowledge together
    kinds: tuple[str, ...] = KINDS
    min_count: int = 1  # samples behind a class mean
    max_count: int = 2**40


def kind_of(name: str) -> tuple[str, str]:
    """`knowledge/class/feature/values` -> `class/feature`, `values`; raises `PayloadError` for any other name."""
    kind, _, field = name.removeprefix(KNOWLEDGE_PREFIX).rpartition("/")
    known = _FIELDS.get(kind, ())
    if not name.startswith(KNOWLEDGE_PREFIX) or not (
        field in known or (kind == "drafts" and _CONV.fullmatch(field) is not None)
    ):
        raise PayloadError("names", f"expected a tensor of one of {', '.join(KINDS)}, got {name[:80]!r}")
    return kind, field


def check_entries(entries: Sequence[Entry], limits: Limits, *, codec: str, source: str) -> frozenset[str]:
    """The kinds that these entries of a container are, if they are whole and inside `limits`."""
    total = sum(entry.nbytes for entry in entries)
    if total > limits.max_bytes:
        raise PayloadError(
            "too_large", f"{source} brings {total} bytes of knowledge, at most {limits.max_bytes} are read"
        )
    groups: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        kind, field = kind_of(entry.name)
        if kind not in limits.kinds:
            known = ", ".join(limits.kinds) or "none"
            raise PayloadError("names", f"{source} brings {kind!r}; the run's method takes {known}")
        groups.setdefault(kind, {})[field] = entry
    for kind, group in groups.items():
        _check_group(kind, group, limits, codec, source)
    return frozenset(groups)


def _check_group(kind: str, group: Mapping[str, Entry], limits: Limits, codec: str, source: str) -> None:
    missing = [field for field in _FIELDS[kind] if field not in group]
    if missing or (kind == "drafts" and len(group) == len(_FIELDS[kind])):
        lacks = ", ".join(missing) or "conv_1"
        raise PayloadError("names", f"{source}: its {kind!r} has no {lacks}")
    for field, entry in group.items():
        _check_entry(kind, field, entry, limits, codec, source)
    rows = {entry.shape[0] for field, entry in group.items() if field not in _NOT_ROWS}
    if len(rows) > 1:
        raise PayloadError("shape", f"{source}: the tensors of its {kind!r} have {_listed(rows)} rows, not as many")
    most = limits.num_classes if kind in CLASS_KINDS else limits.max_rows
    if not 1 <= (count := rows.pop()) <= most:
        raise PayloadError("shape", f"{source}: its {kind!r} has {count} rows, expected 1 to {most}")


def _check_entry(kind: str, field: str, entry: Entry, limits: Limits, codec: str, source: str) -> None:
    integer = field in _INTEGERS
    dims = len(entry.shape)
    flat = field == "logits" or (kind, field) in _VECTORS
    fits = dims == 1 if integer else dims == 2 if flat else dims >= 2
    if field == "ranges":
        fits = dims == 2 and entry.shape[1] == 2
    elif _CONV.fullmatch(field) is not None:
        fits = 2 <= dims <= _DRAFT_DIMS
    if not fits or 0 in entry.shape[1:] or (field in _LISTS and not 1 <= entry.shape[0] <= limits.max_rows):
        raise PayloadError("shape", f"{source}: {entry.name!r} has shape {list(entry.shape)}")
    of_classes = kind == "class/logit" and field == "values"
    if (of_classes or (kind == "maps" and field == "logits")) and entry.shape[1] != limits.num_classes:
        raise PayloadError(
            "shape", f"{source}: {entry.name!r} has {entry.shape[1]} columns, the run has {limits.num_classes} classes"
        )
    if field == "counts" and entry.shape[0] != limits.num_classes:
        raise PayloadError(
            "shape", f"{source}: {entry.name!r} counts {entry.shape[0]} classes, the run has {limits.num_classes}"
        )
    expected = codec_rule(dims, codec, integer=integer)
    if entry.codec != expected:
        raise PayloadError("dtype", f"{source}: {entry.name!r} came as {entry.codec}, expected {expected}")


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(str(number) for number in sorted(numbers))
