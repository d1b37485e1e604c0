"""The container that a job of the aggregator writes. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from coordinator.aggregation.jobs import WrittenFile
from edge_client import faults
from edge_client.errors import FedfitError
from edge_client.wire.container import TableRow
from edge_client.wire.tensors import write_container

__all__ = ["write_output"]


def write_output(
    out: str, table: Sequence[TableRow], tensors: Iterator[Tensor], meta: Mapping[str, Any]
) -> WrittenFile:
    """Write a container; a file that could not be finished is removed."""
    path = Path(out)
    try:
        faults.point("aggregator.write")
        sha256, length = write_container(path, meta, table, tensors)
    except (FedfitError, OSError):
        path.unlink(missing_ok=True)
        raise
    return WrittenFile(sha256=sha256, length=length)
