"""The aggregator's job `study`: what a method makes of a version beside the next round. Imports torch.

A study takes long and runs in a thread while devices train; the fold of their round waits for its result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from coordinator.aggregation.jobs import FoldJob, StudyJob, StudyStarted, StudyTimes
from coordinator.aggregation.knowledge import Memory, lesson_of
from edge_client.config.run_file import RunFile
from edge_client.methods import registry
from edge_client.wire.tensors import ContainerReader

__all__ = ["join_study", "start_study"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Study:
    """The result of a study, and when it was made in seconds since the epoch."""

    tensors: Mapping[str, Tensor]
    began_s: float
    ended_s: float


class _Studies:
    """The study of one version at a time, in one thread.

    A version whose study nobody started (after a restart) is studied when the fold asks for it: the result is the same.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="study")
        self._futures: dict[tuple[str, int], Future[_Study]] = {}

    def start(self, run: RunFile, model: Path, version: int) -> None:
        """Study a version; the study of another one is forgotten."""
        key = (str(model), version)
        if key not in self._futures:
            self._futures = {key: self._pool.submit(_study, run, model, version)}

    def result(self, run: RunFile, model: Path, version: int) -> _Study:
        """The result of a study; waits until it is there."""
        self.start(run, model, version)
        return self._futures.pop((str(model), version)).result()


_STUDIES = _Studies()


def start_study(job: StudyJob) -> StudyStarted:
    """Start the study of a version and return at once."""
    _STUDIES.start(job.run, Path(job.model), job.version)
    return StudyStarted()


def join_study(job: FoldJob) -> tuple[Mapping[str, Tensor], StudyTimes | None]:
    """The result of the study of the previous version, and how long this fold waited for it; empty without studies."""
    rules = registry.knowledge(job.run.method.name, job.run.method.parameters)
    if rules is None or not rules.studies:
        return {}, None
    began = time.monotonic()
    study = _STUDIES.result(job.run, Path(job.model), job.round - 1)
    waited_s = time.monotonic() - began
    return study.tensors, StudyTimes(began_s=study.began_s, ended_s=study.ended_s, waited_s=waited_s)


def _study(run: RunFile, model: Path, version: int) -> _Study:
    teacher, began_s = registry.get(run.method.name, run.method.parameters).knowledge.teacher, time.time()
    assert teacher is not None
    with ContainerReader(model) as reader:
        tensors = dict(teacher.study(Memory(reader), lesson_of(run, version)))
    return _Study(tensors=tensors, began_s=began_s, ended_s=time.time())
