"""The aggregator's job `tell`: the knowledge that devices get before a round. Imports torch."""

from __future__ import annotations

from pathlib import Path

from coordinator.aggregation.extraction import extractor_of
from coordinator.aggregation.jobs import TellJob, WrittenFile
from coordinator.aggregation.knowledge import Memory, contents_of, lesson_of, public_samples
from coordinator.aggregation.output import write_output
from edge_client.wire.tensors import ContainerReader

__all__ = ["write_knowledge"]


def write_knowledge(job: TellJob) -> WrittenFile:
    """Write the knowledge for the devices of a slice, for one device, or the shared samples for all."""
    teacher = extractor_of(job.run, None).method.knowledge.teacher
    assert teacher is not None
    with ContainerReader(Path(job.model)) as reader:
        memory = Memory(reader)
        if job.public:
            items = public_samples(memory)
        else:
            lesson = lesson_of(job.run, job.round)
            items = list(teacher.tell(memory, cut=job.slice, device=job.device, lesson=lesson))
        contents = contents_of(items, job.run.rounds.codec)
    return write_output(job.out, contents.table, iter(contents.tensors), {})
