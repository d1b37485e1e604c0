"""The lines that a worker writes for its daemon while it works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from worker_runs import (
    make_work,
    read_update,
)

from edge_client.records import WorkOrder, from_map
from edge_client.worker.progress import Progress


def test_evaluation_alone_sends_no_weights_and_tells_its_progress(tmp_path: Path, trained: Path) -> None:
    """First and last line of each phase are there, whatever the throttle.

    `trained` has measured this model's rows: a worker that measures them begins again afterwards, and says so.
    """
    work = make_work(tmp_path / "w", train=False)
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "edge_client.worker.process", str(work)]
    environment = os.environ | {"FEDFIT_PROGRESS_FD": str(write_end)}
    process = subprocess.Popen(command, env=environment, pass_fds=[write_end])
    os.close(write_end)
    with open(read_end, encoding="utf-8") as lines:
        progress = [json.loads(line) for line in lines]
    assert process.wait() == 0
    report, tensors = read_update(work)
    assert report.phases is not None
    assert list(report.phases) == ["load", "evaluate"]
    assert (report.payload, report.num_samples, report.steps) == ("none", 0, 0)
    assert list(tensors) == ["evaluation/confusion"]
    told = [(line["phase"], line["step"], line["total"]) for line in progress]
    assert told[:2] == [("load", 0, 1), ("load", 1, 1)]
    assert told[2] == ("evaluate", 1, 3)  # 90 samples in pieces of 32
    assert told[-3:] == [("evaluate", 3, 3), ("write", 0, 1), ("write", 1, 1)]


def test_lines_between_the_first_and_the_last_of_a_phase_are_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand steps at once: the first and the last; a loss that is no number is left out."""
    read_end, write_end = os.pipe()
    monkeypatch.setenv("FEDFIT_PROGRESS_FD", str(write_end))
    progress = Progress()
    for step in range(1, 1001):
        progress.report("train", step, 1000, float("nan") if step == 1 else 0.5)
    os.close(write_end)
    with open(read_end, encoding="utf-8") as lines:
        assert [json.loads(line) for line in lines] == [
            {"phase": "train", "step": 1, "total": 1000, "loss": None},
            {"phase": "train", "step": 1000, "total": 1000, "loss": 0.5},
        ]


def test_a_reader_that_is_gone_ends_the_reports_and_not_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing to the broken pipe happens once."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    monkeypatch.setenv("FEDFIT_PROGRESS_FD", str(write_end))
    progress = Progress()
    progress.report("load", 0, 1)
    assert progress.fd == -1
    progress.report("load", 1, 1)
    os.close(write_end)


def test_the_seconds_of_each_phase_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order says what came before, and when the process was asked for; a phase that comes twice counts twice."""
    now = 10.0
    monkeypatch.setattr("edge_client.worker.progress.time.monotonic", lambda: now)
    order = from_map(WorkOrder, json.loads((make_work(tmp_path / "w") / "order.json").read_text()))
    progress = Progress.of(replace(order, phases={"fetch": 0.25}, starts_at=9.5))
    for phase, seconds in (("load", 1.0), ("evaluate", 2.0), ("train", 4.0), ("evaluate", 0.5), ("write", 9.0)):
        progress.report(phase, 0, 1)
        now += seconds
    assert progress.durations() == {"fetch": 0.25, "start": 0.5, "load": 1.0, "evaluate": 2.5, "train": 4.0}
    assert Progress.of(replace(order, starts_at=now + 1.0)).durations() == {}  # of before a restart of the machine
