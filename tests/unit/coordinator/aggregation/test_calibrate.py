"""The cost of a run's units, measured by the server."""

from __future__ import annotations

from pathlib import Path

from aggregator_jobs import (
    do_job,
    task_run,
)


def test_a_task_is_measured_for_the_devices(tmp_path: Path) -> None:
    """A head of 4 x 2 + 2 floats; nothing if only the devices know the shape of a sample."""
    reply = do_job({"id": 1, "job": "calibrate", **task_run(tmp_path, input_="input=(4,)")})
    assert reply["ok"], reply
    units = reply["rows"]["full"]["modes"]["plain"]
    assert [(unit["name"], unit["parameter_bytes"]) for unit in units] == [("stem", 0), ("head", 40)]
    assert do_job({"id": 2, "job": "calibrate", **task_run(tmp_path)})["rows"] == {}
