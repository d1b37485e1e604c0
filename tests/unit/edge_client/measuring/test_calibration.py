"""Measuring a model in a process of its own: keys, the cache, what is measured, and what can go wrong.

The model of these tests is an mlp of 4x4 images: 16 -> 8 -> 8 -> 3, each block a linear layer with its activation.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typed import typed

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.errors import InputError, MachineError
from edge_client.measuring.calibration import CalibrationJob, calibrated, job_for
from edge_client.planning.rows import ModelRows, save_rows
from edge_client.records import PlanRules
from edge_client.task.task import read_source

MLP = {"name": "mlp", "input": [1, 4, 4], "hidden": [8, 8]}
TASK = """
import os, signal
from torch import nn
from edge_client import Task

class Moody(nn.Linear):
    def forward(self, x):
        if self.training and len(x) > 2:
            MOOD
        return super().forward(x)

moody = Task(model=lambda n: nn.Sequential(Moody(4, 4), nn.Linear(4, n)), train_data=lambda device: None, input=(4,))
calm = Task(model=lambda n: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, n)), train_data=lambda device: None, input=(4,))
"""


def _run(**tables: Any) -> RunFile:
    base: dict[str, Any] = {"name": "r", "model": MLP, "classes": ["a", "b", "c"]}
    return parse_table(RunFile, {k: v for k, v in (base | tables).items() if v is not None}, source="test")


def _job(rules: PlanRules | None = None, *, shape: tuple[int, ...] = (1, 4, 4), **tables: Any) -> CalibrationJob:
    return job_for(_run(**tables), rules or PlanRules(), shape)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the rows of the tests' model are, once one of them has measured it."""
    return tmp_path_factory.mktemp("rows")


@pytest.mark.parametrize(
    "tables",
    [
        {"train": {"batch": 7, "optimizer": "adam", "lr": 1.0}},
        {"seed": 5},
        {"name": "another"},
        {"stop": {"rounds": 3}},
    ],
)
def test_what_does_not_change_the_numbers_does_not_change_the_key(tables: dict[str, Any]) -> None:
    """What batch and optimizer add is known without a measurement."""
    assert _job(**tables).key == _job().key


@pytest.mark.parametrize(
    "other",
    [
        _job(model=MLP | {"hidden": [8, 9]}),
        _job(shape=(1, 4, 5)),
        _job(classes=["a", "b"]),
        _job(PlanRules(groups=True)),
        _job(PlanRules(groups=True, auxiliary=True)),
        _job(PlanRules(weight_copies=1)),
        _job(method={"name": "fedprox"}),
        _job(train={"threads": 2}),
        job_for(_run(), PlanRules(), (1, 4, 4), slice_name="width:1/2"),
        job_for(_run(), PlanRules(), (1, 4, 4), dtype="bf16"),
    ],
)
def test_what_changes_the_numbers_changes_the_key(other: CalibrationJob) -> None:
    """Model, shape, classes, method, threads, slice and dtype."""
    assert other.key != _job().key


def _task_job(folder: Path, mood: str, name: str) -> CalibrationJob:
    path = folder / "nets.py"
    path.write_text(TASK.replace("MOOD", mood))
    task = {"name": "t", "file": f"{path}:{name}", "sha256": read_source(path).sha256}
    return job_for(_run(model=None, task=task), PlanRules(), (4,), task=f"{path}:{name}")


def test_two_tasks_of_one_file_have_different_keys(tmp_path: Path) -> None:
    """Their hash is that of the file."""
    assert _task_job(tmp_path, "pass", "moody").key != _task_job(tmp_path, "pass", "calm").key


def test_a_corrupt_file_is_told_and_measured_again(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes that are no JSON; then there are rows, of 16 x 8 + 8, 8 x 8 + 8 and 8 x 3 + 3 floats."""
    job = _job(PlanRules(groups=True), method={"name": "fedepth"})
    path = cache / f"{job.key}.json"
    path.write_bytes(b'{"format": \xff')
    with caplog.at_level(logging.WARNING):
        rows = calibrated(job, cache)
    assert f"{path}: not usable as cost rows, ignored" in caplog.text
    assert rows.key == job.key
    assert [unit.parameter_bytes for unit in rows.modes["plain"] if unit.kind != "stem"] == [544, 288, 108]
    assert rows.model_bytes == 544 + 288 + 108
    _check_unit_costs(rows)
    assert calibrated(job, cache) == rows


def _check_unit_costs(rows: ModelRows) -> None:
    """A sample's output is 8 floats of a block and 3 of the head; a block holds its input and its activation."""
    blocks = [unit for unit in rows.modes["plain"] if unit.kind == "block"]
    assert [unit.out_bytes for unit in blocks] == [32, 32]
    assert rows.modes["plain"][-1].out_bytes == 12
    for unit in blocks:
        assert unit.alone_backward
        assert unit.alone_held[0] >= 32
    assert 100 * 10**6 < rows.base_bytes < 400 * 10**6


def test_known_rows_are_not_measured_again(tmp_path: Path) -> None:
    """Rows with a base that no process has come back as they are; those under another key do not."""
    job = _job()
    rows = ModelRows(
        key=job.key,
        torch="2",
        machine="m",
        channels_last=False,
        batches=(8, 16),
        base_bytes=1,
        private_base_bytes=1,
        model_bytes=1,
        hidden_bytes=0,
        has_batchnorm=False,
        has_batch_statistics=False,
        min_batch=1,
        modes={"plain": ()},
    )
    save_rows(tmp_path / f"{job.key}.json", rows)
    assert calibrated(job, tmp_path) == rows


def test_a_task_that_fails_while_it_is_measured_is_told_with_its_line(tmp_path: Path) -> None:
    """More than two samples at once: after the warm-up."""
    job = _task_job(tmp_path, 'raise ValueError("not today")', "moody")
    with pytest.raises(InputError, match=r"nets.py, line 9: training it on a few samples: ValueError: not today"):
        calibrated(job, tmp_path)


def test_a_calibration_that_crashes_is_a_problem_of_the_machine(tmp_path: Path) -> None:
    """As the kernel would end it; nothing is kept."""
    job = _task_job(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", "moody")
    with pytest.raises(MachineError, match="the calibration ended with signal SIGKILL"):
        calibrated(job, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_calibration_keeps_to_its_limit(tmp_path: Path) -> None:
    """A megabyte is not enough for its steps."""
    big = _job(model=MLP | {"hidden": [1000, 1000]})
    with pytest.raises(MachineError, match="the calibration needs more memory than there is"):
        calibrated(replace(big, limit_bytes=2**20), tmp_path)


UNORDERED = """
from torch import nn
from edge_client import Task

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, num_classes)

    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(h) + h)

named = Task(model=Net, train_data=lambda device: None, units=["a", "b", "c"], input=(4,))
"""


def test_units_that_cannot_be_ordered_are_a_mistake_in_the_task(tmp_path: Path) -> None:
    """A skip connection over a unit: exit code 3, as for every bad value."""
    (tmp_path / "net.py").write_text(UNORDERED)
    done = typed("edge_client", "plan", "--task", f"{tmp_path}/net.py:named", "--training-budget", "50MB")
    assert done.returncode == 3
    assert "units 'b' and 'c': forward() changes the data between them" in done.stderr
