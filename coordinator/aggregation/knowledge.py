"""Knowledge on the server: checked and read out of updates, learnt from, and packed for the devices. Imports torch.

The server's memory of knowledge lies in the container of a version behind the model, under `memory/`, and never
travels. Devices get a container with knowledge alone (`tell`).
Does not cover: what is learnt (`edge_client.methods`), who gets it when (`conductor`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from coordinator.aggregation.frozen import FrozenUpdate
from edge_client.config.run_file import RunFile
from edge_client.knowledge.kinds import Knowledge, PublicSamples, named_tensors, parse
from edge_client.knowledge.schema import HELD_BACK, KNOWLEDGE_PREFIX, PUBLIC_PART, Limits
from edge_client.methods import registry
from edge_client.methods.base import Header, LeftOut, Lesson, Received, Teacher
from edge_client.wire.container import MEMORY_PREFIX, Entry, TableRow, read_header
from edge_client.wire.tensors import ContainerReader, codec_for, read_entry

__all__ = [
    "Contents",
    "Learning",
    "Memory",
    "check_values",
    "contents_of",
    "first_memory",
    "learn",
    "lesson_of",
    "public_samples",
]

_MAX_DETAIL = 300  # characters of a device's own words


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Tensors that a container is to hold, and its table."""

    table: list[TableRow] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors with their names in the container."""
        for (name, _, _), tensor in zip(self.table, self.tensors, strict=True):
            yield name, tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What the server learnt in a round."""

    memory: Contents = field(default_factory=Contents)
    left_out: list[LeftOut] = field(default_factory=list)  # knowledge that could not be used


class Memory(Mapping[str, Tensor]):
    """The tensors of a server's container under `memory/`; each is read when it is asked for."""

    def __init__(self, reader: ContainerReader) -> None:
        self._reader = reader
        self._names = [name.removeprefix(MEMORY_PREFIX) for name in reader.names(MEMORY_PREFIX)]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._reader.tensor(MEMORY_PREFIX + name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def first_memory(teacher: Teacher | None, run: RunFile) -> dict[str, Tensor]:
    """The memory before the first round, by the names in a container."""
    return {} if teacher is None else _stored(teacher.begin(run))


def learn(
    teacher: Teacher | None,
    reader: ContainerReader,
    updates: Sequence[FrozenUpdate],
    run: RunFile,
    *,
    round_: int,
    studied: Mapping[str, Tensor],
) -> Learning:
    """Let the teacher learn from the knowledge of a round's updates."""
    if teacher is None:
        return Learning()
    limits = registry.knowledge_limits(run)

    def received() -> Iterator[tuple[Header, tuple[Knowledge, ...]]]:
        for update in sorted(updates, key=lambda update: update.device):
            items = _knowledge_of(update, limits, run.rounds.codec)
            if items:
                header = Header(device=update.device, num_samples=update.num_samples, slice=update.slice)
                yield header, items

    memory, lesson = Memory(reader), lesson_of(run, round_)
    after = _stored(teacher.learn(memory, received, lesson, studied))
    left_out = list(teacher.left_out(memory, received, lesson))
    if limits.kinds and all(one.device for one in left_out):
        left_out += _silent(received, updates)
    table: list[TableRow] = [(name, codec_for(value, "fp32"), value.shape) for name, value in after.items()]
    return Learning(memory=Contents(table=table, tensors=list(after.values())), left_out=left_out)


def _silent(received: Received, updates: Sequence[FrozenUpdate]) -> Iterator[LeftOut]:
    """Devices that sent no knowledge, for too few samples, or held it back because it would have been refused."""
    heard = {header.device for header, _ in received()}
    for update in updates:
        reason = read_header(update.path).meta.get(HELD_BACK)
        if isinstance(reason, str):
            yield LeftOut(device=update.device, code="held_back", detail=reason[:_MAX_DETAIL])
        elif update.device not in heard:
            yield LeftOut(device=update.device, code="silent", detail="it trained, and had no knowledge to tell")


def lesson_of(run: RunFile, round_: int) -> Lesson:
    """What a teacher knows about a round."""
    return Lesson(round=round_, num_classes=len(run.classes), seed=run.seed, run=run)


def _stored(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {MEMORY_PREFIX + name: memory[name] for name in sorted(memory)}


def _knowledge_of(update: FrozenUpdate, limits: Limits, codec: str) -> tuple[Knowledge, ...]:
    header = read_header(update.path)
    entries = [entry for entry in header.entries if entry.name.startswith(KNOWLEDGE_PREFIX)]
    fd = os.open(update.path, os.O_RDONLY | os.O_CLOEXEC)
    try:

        def read(entry: Entry) -> Tensor:
            return read_entry(fd, header.data_offset, entry)

        return parse(entries, read, limits, codec=codec, source=f"update from {update.device!r}")
    finally:
        os.close(fd)


def check_values(reader: ContainerReader, limits: Limits, codec: str) -> None:
    """Look at all knowledge of an update; raises `PayloadError`."""
    entries = [entry for entry in reader.header.entries if entry.name.startswith(KNOWLEDGE_PREFIX)]
    parse(entries, lambda entry: reader.tensor(entry.name), limits, codec=codec, source="the update")


def public_samples(memory: Memory) -> list[Knowledge]:
    """The shared samples, which are in every version; devices fetch equal bytes once. An empty set does not travel."""
    values = memory[PUBLIC_PART]
    return [PublicSamples(values=values)] if len(values) else []


def contents_of(items: Iterable[Knowledge], codec: str) -> Contents:
    """Knowledge as it travels."""
    named = named_tensors(items)
    table: list[TableRow] = [(name, codec_for(tensor, codec), tuple(tensor.shape)) for name, tensor in named]
    return Contents(table=table, tensors=[tensor for _, tensor in named])
