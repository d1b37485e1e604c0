"""Tensors and knowledge that stay in their files until they are used, one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from edge_client.device.accelerator import CPU, Accelerator
from edge_client.knowledge.kinds import Knowledge, parse
from edge_client.knowledge.schema import Limits
from edge_client.wire.container import Entry, read_header
from edge_client.wire.tensors import ContainerReader, read_entry

__all__ = ["StoredKnowledge", "StoredTensors"]

_MAX_ROWS = 10**7  # of a table that the coordinator sent


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a file whose names begin with `prefix`, by the rest of their names; each is read when it is used.

    Peers, control variates and earlier models are as large as the model, and not all of them are needed at once.
    `also` is a second prefix, whose tensors keep their whole names. A file that does not exist has no tensors. Each
    comes to `device`.
    """

    def __init__(self, path: Path, prefix: str = "", *, also: str | None = None, device: Accelerator = CPU) -> None:
        self._path = path
        self._device = device
        self._entries: dict[str, Entry] = {}
        if path.exists():
            header = read_header(path)
            self._offset = header.data_offset
            prefixes = (prefix,) if also is None else (prefix, also)
            entries = (entry for entry in header.entries if entry.name.startswith(prefixes))
            self._entries = {entry.name.removeprefix(prefix): entry for entry in entries}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._device.move(read_entry(fd, self._offset, entry))
        finally:
            os.close(fd)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class StoredKnowledge(Iterable[Knowledge]):
    """The knowledge that the coordinator sent, from files: read and checked in every pass over it."""

    def __init__(self, paths: Sequence[Path], *, codec: str, classes: int) -> None:
        self._paths, self._codec, self._classes = paths, codec, classes

    def __iter__(self) -> Iterator[Knowledge]:
        for path in self._paths:
            limits = Limits(num_classes=self._classes, max_rows=_MAX_ROWS, max_bytes=path.stat().st_size)
            with ContainerReader(path) as reader:
                yield from parse(
                    reader.header.entries,
                    lambda entry: reader.tensor(entry.name),
                    limits,
                    codec=self._codec,
                    source="the coordinator",
                )
