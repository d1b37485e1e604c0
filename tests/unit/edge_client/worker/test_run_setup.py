"""What a device's owner allows, and what is wrong with a task: each test starts real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worker_runs import (
    DIGITS,
    TASK,
    fork_worker,
    make_task_work,
    make_work,
    read_error,
    read_update,
)


def test_results_that_are_not_shared_do_not_leave(tmp_path: Path) -> None:
    """Training goes on without its evaluation; an evaluation alone is declined."""
    device = {"data": DIGITS, "share": {"metrics": False}}
    work = make_work(tmp_path / "w", run={"train": {"max-steps": 1}}, device_file=device)
    assert fork_worker(work) == 0
    report, tensors = read_update(work)
    assert (report.evaluation, report.num_samples) == (None, 360)
    assert "evaluation/confusion" not in tensors
    work = make_work(tmp_path / "v", train=False, device_file=device)
    assert fork_worker(work) == 76
    assert read_error(work)["code"] == "not_shared"


@pytest.mark.parametrize(
    ("text", "keys", "code", "message"),
    [
        (TASK, {"tasks": {}}, "task_missing", 'tasks = { squares = "/path/squares.py:task" }'),
        ("raise SystemExit(9)", {"sha256": "0" * 64}, "task_differs", "0" * 64),
        (TASK + "1 / 0\n", {}, "bad_task", "line 28: the task cannot be loaded: ZeroDivisionError"),
        (TASK, {"rename": {"links": "left"}}, "unknown_class", 'rename = { links = "left", rechts = "right" }'),
        (TASK, {"labels": {}}, "bad_data", "line 24: train_data(): KeyError: 'line'"),
        (TASK.replace("self.head(self.stem(x))", "self.head(self.stem(x).relu() - 1)"), {}, "bad_model", "'stem' and"),
    ],
)
def test_what_is_wrong_with_a_task_is_declined_in_one_line(
    tmp_path: Path, text: str, keys: dict[str, Any], code: str, message: str
) -> None:
    """With a code of its own, the user's line, and what to write; a file with another hash is never run."""
    work = make_task_work(tmp_path / "w", text, **keys)
    assert fork_worker(work) == 76, (work / "stderr").read_text()
    told = read_error(work)
    assert told["code"] == code
    assert message in told["detail"]
    assert "\n" not in told["detail"]
    assert "Traceback" not in (work / "stderr").read_text()
