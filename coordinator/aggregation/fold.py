"""The aggregator's job `fold`: the next model of a run out of the frozen set of updates. Imports torch.

Every tensor is folded, checked and written before the next one is read, so that the memory of a fold is that of a few
tensors whatever the model and the cohort. The server's memory of knowledge follows the model in the same container.
Does not cover: how updates are combined (`edge_client.methods`), which of them count (`conductor`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from coordinator.aggregation import studies
from coordinator.aggregation.extraction import extractor_of, prefix_of
from coordinator.aggregation.frozen import FrozenSet, FrozenUpdate, ModelState, stored_name
from coordinator.aggregation.jobs import FoldedModel, FoldJob
from coordinator.aggregation.knowledge import learn
from coordinator.aggregation.output import write_output
from edge_client import faults
from edge_client.errors import PayloadError
from edge_client.methods.slices import WHOLE_MODEL
from edge_client.params import square_sum
from edge_client.wire.container import MEMORY_PREFIX, TableRow
from edge_client.wire.tensors import ContainerReader

__all__ = ["fold_updates"]


def fold_updates(job: FoldJob) -> FoldedModel:
    """Write the next version of a run."""
    faults.point("aggregator.fold.begin")
    with ContainerReader(Path(job.model)) as reader:
        teacher = extractor_of(job.run, job.task).method.knowledge.teacher
        studied, times = studies.join_study(job)
        updates = [
            FrozenUpdate(
                device=update.device, path=Path(update.path), num_samples=update.num_samples, slice=update.slice
            )
            for update in job.updates
        ]
        lessons = learn(teacher, reader, updates, job.run, round_=job.round, studied=studied)
        model = [entry for entry in reader.header.entries if not entry.name.startswith(MEMORY_PREFIX)]
        table = [*((entry.name, entry.codec, entry.shape) for entry in model), *lessons.memory.table]
        folded = itertools.chain(_folded_model(job, reader, updates), lessons.memory.named_tensors())
        written = write_output(job.out, table, _checked(folded, table), reader.header.meta)
    faults.point("aggregator.fold.written")
    return FoldedModel(sha256=written.sha256, length=written.length, left_out=tuple(lessons.left_out), study=times)


def _folded_model(
    job: FoldJob, reader: ContainerReader, updates: Sequence[FrozenUpdate]
) -> Iterator[tuple[str, Tensor]]:
    """The new tensors by their names in the container: of one model, or of each slice that is a model of its own."""
    extractor, train, model = extractor_of(job.run, job.task), job.run.train, Path(job.model)
    server = extractor.method.server
    momentum = train.momentum if train.optimizer == "sgd" else 0.0
    if not extractor.has_separate_models:
        frozen = FrozenSet(model, updates, places=extractor.places, num_devices=job.num_devices, momentum=momentum)
        for name, tensor in server.fold(ModelState(reader), frozen, round=job.round):
            yield stored_name(name), tensor
        return
    others = [architecture for architecture in extractor.architectures if architecture != WHOLE_MODEL]
    for architecture in (WHOLE_MODEL, *others):
        prefix = prefix_of(architecture)
        state = ModelState(reader, prefix)
        its_updates = [update for update in updates if update.slice == architecture]
        if its_updates:  # the number of devices is unknown here: not all of the run's have this architecture
            folded = server.fold(
                state, FrozenSet(model, its_updates, prefix=prefix, momentum=momentum), round=job.round
            )
        else:
            folded = ((name, state.tensor(name)) for name in state.names())
        for name, tensor in folded:
            yield prefix + stored_name(name), tensor


def _checked(folded: Iterator[tuple[str, Tensor]], table: Sequence[TableRow]) -> Iterator[Tensor]:
    """The tensors of a fold; a model that is not finite is never written: every later round would inherit it."""
    for index, ((listed, _, _), (name, tensor)) in enumerate(zip(table, folded, strict=True)):
        if name != listed:
            raise ValueError(f"the method folded {name!r} where {listed!r} was due; keep the order of state.names()")
        if index == len(table) // 2:
            faults.point("aggregator.fold.middle")
        if tensor.is_floating_point() and not math.isfinite(square_sum(tensor)):
            raise PayloadError("not_finite", f"the fold of the updates makes {name!r} not finite")
        yield tensor
