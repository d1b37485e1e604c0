"""Records what training by a plan allocates and frees, in order, for the replay of an accelerator's allocator.

    a few whole pieces and a rest, a last batch, whole pieces and a rest again: with 6 and with 12 samples in a piece

through the real loop and the method's own client half, in a process of its own on the CPU: torch's profiler reports
every allocation with its address. What the same step takes on an accelerator is the same tensors; its kernels may take
other scratch memory, which the bound that follows leaves room for.
Covers: recording, the call in another process, the cache. Does not cover: sizes and replay
(`planning.allocation_sequence`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client import durable
from edge_client.config.run_file import RunFile
from edge_client.errors import FedfitError, PayloadError
from edge_client.measuring import subprocess_call
from edge_client.planning.allocation_sequence import FORMAT, GIVEN_BACK, AllocationSequence, Recorded, pair
from edge_client.records import Hash, TrainingPlan, from_map, to_map

if TYPE_CHECKING:
    from torch import Tensor

    from edge_client.measuring.prepared_training import PreparedTraining
    from edge_client.training.contract import Batch, Client, Data, Phase, Term

__all__ = ["RecordingJob", "find", "job_for", "main", "measure", "record"]

_log = logging.getLogger(__name__)

_PREFIX = "fedfit/allocations/"
_MAX_FILE_BYTES = 32 * 2**20
_WHOLE, _REST, _LAST = 6, 3, 4  # samples of the pieces; for the second recording twice as many
_PLAN_FIELDS = ("slice", "groups", "skipped", "recompute", "dtype", "num_models")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingJob:
    """A way to train, without its sizes."""

    key: Hash
    run: RunFile
    input_shape: tuple[int, ...]
    plan: TrainingPlan
    in_pieces: bool  # a batch is more than one microbatch
    task: str | None = None  # the task's file and object, FILE:OBJECT


def job_for(
    run: RunFile, model_key: str, input_shape: Sequence[int], plan: TrainingPlan, *, task: str | None = None
) -> RecordingJob:
    """The job for a plan; `model_key` stands for model, method, classes, threads, torch and kind of machine."""
    way, train = to_map(plan), run.train
    in_pieces = plan.microbatch < train.batch
    optimizer = [train.optimizer, train.momentum > 0, train.weight_decay > 0]
    identity = [FORMAT, model_key, {name: way[name] for name in _PLAN_FIELDS}, in_pieces, optimizer, to_map(run.method)]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    bare = TrainingPlan(
        slice=plan.slice,
        groups=plan.groups,
        skipped=plan.skipped,
        recompute=plan.recompute,
        dtype=plan.dtype,
        num_models=plan.num_models,
        microbatch=_WHOLE,
        budget_bytes=0,
        predicted_bytes=0,
    )
    return RecordingJob(key=key, run=run, input_shape=tuple(input_shape), plan=bare, in_pieces=in_pieces, task=task)


def find(job: RecordingJob, cache: Path | None) -> AllocationSequence | None:
    """The sequence from the cache, or recorded now in a process of its own; None, with a warning, where that fails."""
    path = cache / f"allocations-{job.key}.json" if cache is not None else None
    cached = _read(path, job.key) if path is not None else None
    if cached is not None:
        return cached
    try:
        result = subprocess_call.call(
            "edge_client.measuring.allocation_recording", job, threads=1, what="the recording of allocations"
        )
        sequence = from_map(AllocationSequence, result, where="result of the recording")
    except (FedfitError, MemoryError) as error:
        _log.warning("allocations were not recorded, and plans are made with more room: %s", error)
        return None
    if path is not None:
        try:
            durable.make_dir(path.parent)
            path.write_text(json.dumps(result), encoding="utf-8")
        except (OSError, FedfitError) as error:
            _log.warning("cannot keep recorded allocations in %s: %s", path, error)
    return sequence


def _read(path: Path, key: str) -> AllocationSequence | None:
    try:
        with open(path, "rb") as file:
            sequence = from_map(AllocationSequence, json.loads(file.read(_MAX_FILE_BYTES)), where=str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, PayloadError) as error:
        _log.warning("%s: not usable as recorded allocations, ignored (%s)", path, str(error)[:200])
        return None
    return sequence if sequence.key == key else None


def measure(job: RecordingJob) -> AllocationSequence:
    """Record in this process; malloc must be pinned before torch is loaded."""
    import torch

    from edge_client.measuring.prepared_training import prepare

    torch.set_num_threads(1)  # memory that other threads take is reported in any order
    prepared = prepare(
        job.run,
        job.input_shape,
        task=job.task,
        slice_name=job.plan.slice,
        dtype="fp32" if job.plan.dtype == "fp32" else "bf16",
    )  # of fp16, the same bytes
    prepared.model.recompute = job.plan.recompute
    with prepared.recipe.user_code("training it on a few samples"):
        return record(prepared, job)


def record(prepared: PreparedTraining, job: RecordingJob) -> AllocationSequence:
    """The sequence of a model that is warm."""
    small, large = (_recorded(prepared, job, factor) for factor in (1, 2))
    lasting = [tensor.nbytes for tensor in prepared.model.state_dict().values()]
    return pair(job.key, lasting, small, large)


def _recorded(prepared: PreparedTraining, job: RecordingJob, factor: int) -> Recorded:
    whole, rest, last = (factor * size for size in (_WHOLE, _REST, _LAST))
    batch = 2 * whole + rest if job.in_pieces else whole
    num_samples = batch + (whole + last if job.in_pieces else last)
    names = {whole: "whole", rest: "rest", last: "last"}
    _steps(prepared, job, _Marks(), batch, num_samples, whole)  # libraries choose their kernels at the first step
    marks = _Marks()
    with _profiled() as events:
        _steps(prepared, job, marks, batch, num_samples, whole)
    return Recorded(
        events=tuple(_read_events(events, names)), samples={**{n: s for s, n in names.items()}, "chunk": whole}
    )


def _steps(
    prepared: PreparedTraining, job: RecordingJob, marks: _Marks, batch: int, num_samples: int, microbatch: int
) -> None:
    """Three steps of each phase: a batch, the last one of an epoch, a batch again."""
    from edge_client.training.loop import train

    plan = replace(job.plan, microbatch=microbatch)
    client = prepared.client(plan, epochs=2)
    settings = replace(prepared.settings(batch, plan), microbatch=microbatch)
    _observe(client, marks, num_samples)
    samples = _Marked(prepared.samples(num_samples), marks, num_samples)
    settings = replace(settings, max_steps=3 * len(client.phases()), warm_up=False)
    marks.begin(prepared.model)
    try:
        train(prepared.model, client, samples, settings)
        client.end()
    finally:
        marks.end(prepared.model)


def _observe(client: Client, marks: _Marks, num_samples: int) -> None:
    """Mark where the terms of a piece begin and where a phase ends; phases are as short as the samples."""
    phases, terms = client.phases, client.terms

    def shortened_phases() -> list[Phase]:
        from dataclasses import replace as changed

        return [
            changed(
                phase,
                epochs=2,
                data=_Marked(phase.data, marks, num_samples) if phase.data is not None else None,
            )
            for phase in phases()
        ]

    def marked_terms(batch: Batch, phase: Phase) -> Iterator[Term]:
        marks.terms(len(batch.y), phase.name)
        return terms(batch, phase)

    # the client half is this recording's own, and is changed in place
    client.phases = shortened_phases  # type: ignore[method-assign]
    client.terms = marked_terms  # type: ignore[method-assign]


class _Marked:
    """The first samples of others, with a mark where some are taken."""

    def __init__(self, data: Data, marks: _Marks, num_samples: int) -> None:
        self._data, self._marks = data, marks
        self.labels = data.labels[:num_samples]

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        self._marks.taken()
        return self._data.batch(indices)


@dataclass(slots=True)
class _Marks:
    """Names of places in the recording."""

    _original: Any = None
    names: list[str] = field(default_factory=list)

    def _mark(self, name: str) -> None:
        from torch.autograd import profiler

        with profiler.record_function(_PREFIX + name):
            self.names.append(name)

    def taken(self) -> None:
        """The samples of a piece, or of a chunk, are about to be read."""
        self._mark("take")

    def terms(self, num_samples: int, phase: str) -> None:
        """They are there, as many as these."""
        self._mark(f"terms/{num_samples}/{phase}")

    def begin(self, model: Any) -> None:
        """Mark the units that run without gradient, too."""
        import torch

        original = model.run_units

        def run_units(names: Sequence[str], x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                self._mark("frozen")
            result: Tensor = original(names, x)
            return result

        model.run_units = run_units

    def end(self, model: Any) -> None:
        """The model is as it was."""
        del model.run_units


@contextmanager
def _profiled() -> Iterator[list[Any]]:
    """The profiler's nodes, in order; complete after the body."""
    from torch.autograd import profiler

    nodes: list[Any] = []
    with profiler.profile(profile_memory=True) as profile:
        yield nodes
    nodes.extend(_walk(profile.kineto_results.experimental_event_tree()))
    nodes.sort(key=lambda node: node.start_time_ns)


def _walk(nodes: Iterable[Any]) -> Iterator[Any]:
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children)


def _read_events(nodes: Sequence[Any], names: dict[int, str]) -> Iterator[tuple[int, int, str]]:
    """Number each allocation, pair it with its free, and name the piece whose samples it depends on."""
    rows = list(_numbered(nodes))
    for row, piece in zip(rows, _pieces(rows, names), strict=True):
        if isinstance(row, tuple):
            yield (*row, piece)


def _numbered(nodes: Sequence[Any]) -> Iterator[tuple[int, int] | str]:
    """Each event as (number, bytes), and marks as text. What was allocated before is not freed here."""
    numbers: dict[int, int] = {}
    count = GIVEN_BACK
    for node in nodes:
        if node.name == "[memory]":
            fields = node.extra_fields
            if fields.alloc_size > 0:
                count += 1
                numbers[fields.ptr] = count
                yield count, int(fields.alloc_size)
            elif fields.ptr in numbers:
                yield numbers.pop(fields.ptr), int(fields.alloc_size)
        elif node.name.startswith(_PREFIX):
            yield node.name.removeprefix(_PREFIX)


def _pieces(rows: list[tuple[int, int] | str], names: dict[int, str]) -> list[str]:
    """The piece of each row; what frozen units take and give back before a piece's terms depends on a chunk."""
    pieces = ["whole"] * len(rows)
    begins, phase = 0, ""
    starts = []  # of the pieces: (where the samples are read, where the terms begin, name)
    for position, row in enumerate(rows):
        if row == "take":
            begins = position
        elif isinstance(row, str) and row.startswith("terms/"):
            _, num_samples, name = row.split("/", 2)
            if phase not in ("", name):  # the loop has given cached memory back
                rows[begins] = (GIVEN_BACK, 0)
            phase = name
            starts.append((begins, position, names[int(num_samples)]))
    ends = [start for start, _, _ in starts[1:]] + [len(rows)]
    for (start, terms, name), end in zip(starts, ends, strict=True):
        pieces[start:end] = [name] * (end - start)
        if "frozen" in rows[start:terms]:
            freed = {row[0] for row in rows[start:terms] if isinstance(row, tuple) and row[1] < 0}
            for position in range(start, terms):
                row = rows[position]
                if isinstance(row, tuple) and row[0] in freed:
                    pieces[position] = "chunk"
    return pieces


def main(argv: Sequence[str] | None = None) -> int:
    """Record; returns the exit code."""
    return subprocess_call.serve(RecordingJob, measure, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
