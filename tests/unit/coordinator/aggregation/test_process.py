"""The aggregator's process: answers in order, errors as answers, faults where they are named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from aggregator_jobs import (
    INT8,
    RUN,
    do_job,
    fold_job,
    report_meta,
    save,
)

from edge_client import durable

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ({"job": "dance"}, "malformed"),
        ({"job": ["fold"]}, "malformed"),
        ({"job": "encode", "run": RUN, "model": "/nowhere", "out": "/nowhere/o"}, "machine"),
        ({"job": "encode", "run": RUN, "model": "/nowhere", "slice": "a b", "out": "/nowhere/o"}, "malformed"),
        ({"job": "init", "out": "/nowhere/o"}, "malformed"),
        ({"job": "init", "run": RUN, "out": "/nowhere/o"}, "machine"),
        (
            {"job": "init", "run": RUN | {"model": RUN["model"] | {"name": "brain"}}, "out": "/nowhere/o"},
            "unknown_name",
        ),
        ({"job": "init", "run": RUN | {"model": RUN["model"] | {"options": {"x": 1}}}, "out": "/nowhere/o"}, "input"),
    ],
)
def test_what_cannot_be_done_is_an_answer(job: dict[str, Any], code: str) -> None:
    """The process goes on; the coordinator decides."""
    reply = do_job({"id": 7} | job)
    assert (reply["id"], reply["ok"], reply["code"]) == (7, False, code)
    assert reply["detail"]


def _process(lines: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coordinator.aggregation.process"],
        input="".join(line + "\n" for line in lines),
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_process_answers_every_job_in_order_and_ends_with_its_input(tmp_path: Path) -> None:
    """Three jobs, the second refused; nothing but answers on standard output."""
    init = {"id": "a", "job": "init", "run": RUN, "out": str(tmp_path / "m")}
    encode = {"id": "c", "job": "encode", "run": INT8, "model": str(tmp_path / "m"), "out": str(tmp_path / "e")}
    done = _process([json.dumps(job) for job in (init, {"id": "b", "job": "dance"}, encode)])
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(reply["id"], reply["ok"]) for reply in replies] == [("a", True), ("b", False), ("c", True)]
    assert replies[2]["sha256"] == durable.sha256_file(tmp_path / "e")
    assert done.returncode == 0


def test_a_bug_ends_the_process_with_a_traceback() -> None:
    """A line that is no JSON can only come from a bug of ours."""
    done = _process(["{"])
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("point", ["begin", "middle", "written"])
def test_a_kill_during_a_fold_gives_no_answer(tmp_path: Path, point: str) -> None:
    """The point is hit in round 3, once; the log remembers it, so that the next process does the fold."""
    model = save(tmp_path / "m", {"a": torch.zeros(3), "b": torch.zeros(3)})
    update = save(tmp_path / "u", {"a": torch.ones(3), "b": torch.ones(3)}, meta=report_meta("params"))
    job = json.dumps(fold_job(model, [("a", update, 1)], tmp_path / "out"))
    fault = {"FEDFIT_FAULT": f"kill:aggregator.fold.{point}@3", "FEDFIT_FAULT_LOG": str(tmp_path / "log")}
    done = _process([job], **fault)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert (tmp_path / "log").read_text() == f"kill:aggregator.fold.{point}@3\n"
    if point == "middle":
        assert json.loads(_process([job], **fault).stdout)["ok"]


def test_a_full_disk_during_a_fold_is_an_answer(tmp_path: Path) -> None:
    """It passes alone; the half-written file is gone and the same job works again."""
    model = save(tmp_path / "m", {"a": torch.zeros(3), "b": torch.zeros(3)})
    update = save(tmp_path / "u", {"a": torch.ones(3), "b": torch.ones(3)}, meta=report_meta("params"))
    job = json.dumps(fold_job(model, [("a", update, 1)], tmp_path / "out"))
    done = _process([job, job], FEDFIT_FAULT="enospc:aggregator.fold.middle")
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert (first["ok"], first["code"]) == (False, "disk_full")
    assert second["ok"]


def test_malloc_is_pinned_before_torch_is_loaded() -> None:
    """Importing the module must not load torch: `main` pins malloc first."""
    code = "import sys, coordinator.aggregation.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
