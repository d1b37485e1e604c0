"""Checks for the doctor that need torch: whether torch works here, and whether the device's data can be read.

They run in a process of their own (`python -m edge_client.operate.self_check JOB.json RESULT.json`), because a broken
torch or a user's task may end the process that loads it. Reads one sample of each set; nothing is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_client.config.device_file import DataSection, DeviceFile
from edge_client.errors import InputError, MachineError
from edge_client.measuring import subprocess_call
from edge_client.records import Count, Matches, Text, from_map

if TYPE_CHECKING:
    from edge_client.data.sample_set import SampleSet

__all__ = ["CheckJob", "ReadSets", "TorchWorks", "check_torch", "read_samples"]

_IMAGE = (3, 32, 32)  # for sets whose samples take any size


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckJob:
    """What to check: torch, or the data of this device."""

    what: Annotated[str, Matches(r"torch|data")]
    name: Text = ""
    device: DeviceFile = field(default_factory=DeviceFile)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchWorks:
    """The result of loading torch and multiplying two matrices."""

    version: Text
    gpu: Text = ""  # that this process may use
    no_gpu: Text = ""  # why there is none
    base_bytes: Count = 0  # what the process takes then


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSets:
    """The data sets of which a sample was read, each as (origin, number of samples)."""

    sets: tuple[tuple[Text, Count], ...]


def check_torch() -> TorchWorks:
    """Load torch and use it, in another process; raises `MachineError` if that fails."""
    return from_map(TorchWorks, _ask(CheckJob(what="torch"), "loading torch"))


def read_samples(name: str, device: DeviceFile) -> ReadSets:
    """Read one sample of each data set, in another process; raises `InputError` or `MachineError`.

    A task sees no classes, because these belong to a run.
    """
    return from_map(ReadSets, _ask(CheckJob(what="data", name=name, device=device), "reading a sample"))


def _ask(job: CheckJob, what: str) -> object:
    try:
        return subprocess_call.call("edge_client.operate.self_check", job, threads=1, what=what)
    except MemoryError as error:
        raise MachineError(f"{what}: there is not enough memory: {error}") from error


def _check(job: CheckJob) -> TorchWorks | ReadSets:
    return _check_torch() if job.what == "torch" else _read_samples(job)


def _check_torch() -> TorchWorks:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of another system
        raise MachineError(f"torch cannot be loaded: {' '.join(str(error).split())[:300]}") from error

    from edge_client.device import accelerator, meter

    ones = torch.ones(64, 64)
    if float((ones @ ones)[0, 0]) != 64.0:
        raise MachineError("torch computes wrongly: the product of two matrices of ones, 64 by 64, is not 64")
    choice = accelerator.choose("auto")
    gpu = choice.accelerator.fingerprint() if choice.accelerator is not accelerator.CPU else ""
    return TorchWorks(
        version=torch.__version__, gpu=gpu, no_gpu=choice.reason[:2000], base_bytes=meter.peak_rss_bytes()
    )


def _read_samples(job: CheckJob) -> ReadSets:
    return ReadSets(sets=tuple((where, _read_one(sample_set)) for where, sample_set in _sets(job)))


def _read_one(sample_set: SampleSet) -> int:
    """Read the first sample; returns the number of samples."""
    import numpy as np

    count = len(sample_set.labels.values)
    if count == 0:
        raise InputError(f"{sample_set.where}: expected samples, got none")
    rows, convert = sample_set.rows(np.array([0]), sample_set.shape or _IMAGE)
    convert(rows.take(np.array([0])))
    return count


def _sets(job: CheckJob) -> Iterator[tuple[str, SampleSet]]:
    section = job.device.data
    if section is not None and section.source:
        yield from _named(section)
    for name, place in job.device.tasks.items():
        for what, sample_set in _of_task(place, job):
            yield f"task {name}, {what}", sample_set


def _named(section: DataSection) -> Iterator[tuple[str, SampleSet]]:
    from edge_client.data import registry
    from edge_client.data.openers import open_test, open_train

    section = registry.located(section)
    partition = registry.parse_partition(section.partition)
    key = partition.name if partition.kind == "key" else None
    train = open_train(section.source, Path(section.train), key=key, shape=_IMAGE)
    yield "training", train
    place = Path(section.test or section.train)
    test = open_test(section.source, place, inside=not section.test, key=key, shape=_IMAGE)
    if test is not None:
        yield "test", test


def _of_task(place: str, job: CheckJob) -> Iterator[tuple[str, SampleSet]]:
    from edge_client.data.user_dataset import as_set
    from edge_client.task.task import Device, data_table, load_task
    from edge_client.user_code import UserCode

    task, path = load_task(place), place.rpartition(":")[0]
    table = data_table(job.device.data or DataSection())
    device = Device(name=job.name, data=table, classes=(), labels=dict(job.device.labels))
    for what, make in (("train_data()", task.train_data), ("test_data()", task.test_data)):
        if make is not None:
            with UserCode(path, what):
                dataset = make(device)
            if dataset is not None:
                yield what, as_set(dataset, path, what)


if __name__ == "__main__":
    sys.exit(subprocess_call.serve(CheckJob, _check, sys.argv[1:]))
