"""The aggregator's job `normalise`: the first model with the mean and the scale of all devices' inputs. Imports torch.

Does not cover: the sums, whose arithmetic is `edge_client.data.input_sums`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from coordinator.aggregation.jobs import FoldedModel, NormaliseJob
from coordinator.aggregation.output import write_output
from edge_client.data.input_sums import MEAN, SCALE, Normalisation, normalisation_of
from edge_client.methods.base import LeftOut
from edge_client.wire.tensors import ContainerReader

__all__ = ["normalise_model"]

_MOST_WARNED = 5


def normalise_model(job: NormaliseJob) -> FoldedModel:
    """Write the first model again, with the numbers in all its networks; without sums they stay 0 and 1."""
    numbers = normalisation_of(job.sums, job.weights) if job.sums else None
    with ContainerReader(Path(job.model)) as reader:
        table = [(entry.name, entry.codec, entry.shape) for entry in reader.header.entries]
        written = write_output(job.out, table, _tensors(reader, numbers), reader.header.meta)
    return FoldedModel(sha256=written.sha256, length=written.length, left_out=tuple(_warnings(numbers)))


def _tensors(reader: ContainerReader, numbers: Normalisation | None) -> Iterator[Tensor]:
    for entry in reader.header.entries:
        if entry.name.endswith(f".{MEAN}"):
            yield torch.tensor(numbers.mean, dtype=torch.float32) if numbers else torch.zeros(tuple(entry.shape))
        elif entry.name.endswith(f".{SCALE}"):
            yield torch.tensor(numbers.scale, dtype=torch.float32) if numbers else torch.ones(tuple(entry.shape))
        else:
            yield reader.tensor(entry.name)


def _warnings(numbers: Normalisation | None) -> Iterator[LeftOut]:
    if numbers is None:
        yield LeftOut(device="", code="no_sums", detail="normalise: no device reported sums; inputs stay as they are")
        return
    if numbers.constant:
        shown = ", ".join(map(str, numbers.constant[:_MOST_WARNED]))
        more = len(numbers.constant) - _MOST_WARNED
        shown += f" and {more} more" if more > 0 else ""
        verb = (
            "channel {} is constant; it is only shifted"
            if len(numbers.constant) == 1
            else ("channels {} are constant; they are only shifted")
        )
        yield LeftOut(device="", code="constant_channel", detail="normalise: " + verb.format(shown))
