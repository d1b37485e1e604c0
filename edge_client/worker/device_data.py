"""This device's samples for an assignment: those of its data source, or those that the run's task returns.

Covers: opening and dividing them. Does not cover: the formats (`data`), the memory limit meanwhile (`loading`).
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.config.device_file import DataSection
from edge_client.data.sources import Samples, divide, open_data
from edge_client.data.user_dataset import as_set
from edge_client.task.run_model import Recipe
from edge_client.task.task import Device, Task, data_table
from edge_client.user_code import UserCode
from edge_client.worker.declined import DeclinedError
from edge_client.worker.order_files import Assignment
from edge_client.worker.process_cache import ProcessCache

__all__ = ["DeviceData", "open_device_data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceData:
    """What this device trains on, and what it tests with."""

    train: Samples
    test: Samples

    @property
    def held_bytes(self) -> int:
        """Of both, in memory for the length of the assignment."""
        return self.train.held_bytes + self.test.held_bytes


def open_device_data(assignment: Assignment, recipe: Recipe, cache: ProcessCache) -> DeviceData:
    """Open the samples; raises `DeclinedError` if there are none for what is asked, `InputError` for a bad source."""
    section, run, device = assignment.device.data, assignment.run, assignment.device
    if recipe.task is not None:
        train, test = _open_task_data(assignment, recipe, recipe.task, section or DataSection())
        source = run.what
    else:
        if section is None or not section.source:
            raise DeclinedError("no_data", "this device has no data; name it in the data section of device.toml")
        assert run.model is not None
        shape, rename, data_section = run.model.input, device.rename, section
        train, test = cache.once(
            "data",
            [data_section, run.classes, shape, rename],
            lambda: open_data(data_section, run.classes, shape, rename),
        )
        source = f"data source {section.source!r}"
    if not assignment.only_evaluates and len(train) == 0:
        raise DeclinedError("no_data", f"{source} has no training samples for this device")
    if assignment.only_evaluates and len(test) == 0:
        raise DeclinedError("no_data", f"{source} has no test samples for this device; set data.test-fraction")
    return DeviceData(train=train, test=test)


def _open_task_data(
    assignment: Assignment, recipe: Recipe, task: Task, section: DataSection
) -> tuple[Samples, Samples]:
    path, classes, file = recipe.path, assignment.run.classes, assignment.device
    device = Device(name=assignment.order.device, data=data_table(section), classes=classes, labels=dict(file.labels))
    with UserCode(path, "train_data()"):
        train_set = as_set(task.train_data(device), path, "train_data()")
    test_set = None
    if task.test_data is not None:
        with UserCode(path, "test_data()"):
            dataset = task.test_data(device)
            test_set = as_set(dataset, path, "test_data()") if dataset is not None else None
    return divide(train_set, test_set, section, classes, recipe.input_shape, file.rename)
