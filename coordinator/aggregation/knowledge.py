"""What the aggregator does with knowledge: reads it out of updates, lets a teacher learn, writes what it tells.

The server's memory lies in the container of a version behind the model, under `memory/`; it never travels. What devices
are told is a container of its own, with nothing but knowledge. Imports torch.
Does not cover: what is learnt (`edge_client.methods`), who is told when (`conductor`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from coordinator.aggregation.frozen import FrozenUpdate
from edge_client.config.run_file import RunFile
from edge_client.knowledge.kinds import Knowledge, PublicSamples, named_tensors, parse
from edge_client.knowledge.schema import HELD_BACK, KNOWLEDGE_PREFIX, PUBLIC_PART, Limits
from edge_client.methods import registry
from edge_client.methods.base import Header, LeftOut, Lesson, Received, Teacher
from edge_client.wire.container import MEMORY_PREFIX, Entry, TableRow, read_header
from edge_client.wire.tensors import ContainerReader, codec_for, read_entry

__all__ = ["Memory", "Studies", "Study", "Written", "check_values", "first_memory", "learnt", "public", "told"]

_MAX_DETAIL = 300  # characters of a device's own words
Written = tuple[list[TableRow], list[Tensor]]  # table and values of tensors that are to be written


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
    """Before the first round, by the names in a container."""
    return {} if teacher is None else _stored(teacher.begin(run))


def learnt(
    teacher: Teacher | None,
    reader: ContainerReader,
    updates: Sequence[FrozenUpdate],
    run: RunFile,
    *,
    round_: int,
    studied: Mapping[str, Tensor],
) -> tuple[Written, list[LeftOut]]:
    """The memory after a round, and what could not be learnt from."""
    if teacher is None:
        return ([], []), []
    limits = registry.knowledge_limits(run)

    def received() -> Iterator[tuple[Header, tuple[Knowledge, ...]]]:
        for update in sorted(updates, key=lambda update: update.device):
            items = _knowledge_of(update, limits, run.rounds.codec)
            if items:
                header = Header(device=update.device, num_samples=update.num_samples, slice=update.slice)
                yield header, items

    memory, lesson = Memory(reader), _lesson(run, round_)
    after = _stored(teacher.learn(memory, received, lesson, studied))
    missing = list(teacher.left_out(memory, received, lesson))
    missing += _silent(received, updates) if limits.kinds and all(found.device for found in missing) else []
    table: list[TableRow] = [(name, codec_for(value, "fp32"), value.shape) for name, value in after.items()]
    return (table, list(after.values())), missing


def _silent(received: Received, updates: Sequence[FrozenUpdate]) -> Iterator[LeftOut]:
    """Devices that had nothing to tell, for too few samples; and what some kept because it would have been refused."""
    heard = {header.device for header, _ in received()}
    for update in updates:
        said = read_header(update.path).meta.get(HELD_BACK)
        if isinstance(said, str):
            yield LeftOut(device=update.device, code="held_back", detail=said[:_MAX_DETAIL])
        elif update.device not in heard:
            yield LeftOut(device=update.device, code="silent", detail="it trained, and had no knowledge to tell")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What a teacher made beside a round, and when: seconds since the epoch, for people."""

    made: dict[str, Tensor] = field(default_factory=dict)
    began_s: float
    ended_s: float


class Studies:
    """What teachers make beside a round, in a thread of this process; of one version at a time.

    A version that nobody announced (after a restart) is studied when it is asked for: the result is the same.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="study")
        self._begun: dict[tuple[str, int], Future[Study]] = {}

    def begin(self, run: RunFile, model: Path, version: int) -> None:
        """Study a version's memory; what was begun for another is forgotten."""
        key = (str(model), version)
        if key not in self._begun:
            self._begun = {key: self._pool.submit(_studied, run, model, version)}

    def result(self, run: RunFile, model: Path, version: int) -> Study:
        """What came out of it; waits until it is there."""
        self.begin(run, model, version)
        return self._begun.pop((str(model), version)).result()


def _studied(run: RunFile, model: Path, version: int) -> Study:
    teacher, began = registry.get(run.method.name, run.method.parameters).knowledge.teacher, time.time()
    assert teacher is not None
    with ContainerReader(model) as reader:
        made = dict(teacher.study(Memory(reader), _lesson(run, version)))
    return Study(made=made, began_s=began, ended_s=time.time())


def _stored(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {MEMORY_PREFIX + name: memory[name] for name in sorted(memory)}


def _lesson(run: RunFile, round_: int) -> Lesson:
    return Lesson(round=round_, num_classes=len(run.classes), seed=run.seed, run=run)


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


def told(teacher: Teacher, reader: ContainerReader, run: RunFile, *, cut: str, device: str, round_: int) -> Written:
    """What the devices of a slice, or one device, are told before a round."""
    return _travelling(teacher.tell(Memory(reader), cut=cut, device=device, lesson=_lesson(run, round_)), run)


def public(reader: ContainerReader, run: RunFile) -> Written:
    """The shared samples, which every version has; devices fetch equal bytes once. Of an empty set nothing travels."""
    values = Memory(reader)[PUBLIC_PART]
    return _travelling([PublicSamples(values=values)] if len(values) else [], run)


def _travelling(items: Iterable[Knowledge], run: RunFile) -> Written:
    named, codec = named_tensors(items), run.rounds.codec
    table: list[TableRow] = [(name, codec_for(tensor, codec), tuple(tensor.shape)) for name, tensor in named]
    return table, [tensor for _, tensor in named]
