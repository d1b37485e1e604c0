"""The aggregator's job `encode`: a slice of a model as it travels to the devices. Imports torch."""

from __future__ import annotations

from pathlib import Path

from coordinator.aggregation.extraction import extractor_of
from coordinator.aggregation.jobs import EncodeJob, WrittenFile
from coordinator.aggregation.output import write_output
from edge_client.wire.tensors import ContainerReader

__all__ = ["encode_slice"]


def encode_slice(job: EncodeJob) -> WrittenFile:
    """Write the container of a slice, in the codec of the run."""
    extractor = extractor_of(job.run, job.task)
    with ContainerReader(Path(job.model)) as reader:
        table = extractor.table(job.slice, reader.header, job.run.rounds.codec)
        tensors, meta = extractor.tensors(job.slice, reader), extractor.meta(job.slice, reader.header)
        return write_output(job.out, table, tensors, meta)
