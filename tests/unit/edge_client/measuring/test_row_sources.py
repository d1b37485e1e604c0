"""Which cost rows a worker plans with: its own, the run's, measured ones, foreign ones with a margin, none."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cost_rows import rows
from rows import run_file

from edge_client.measuring.calibration import CalibrationJob, job_for
from edge_client.measuring.row_sources import CalibrationNeededError, find_rows, sent_rows
from edge_client.planning.rows import ModelRows, save_rows
from edge_client.records import PlanRules, to_map

ROOM = 10**9


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalibrationJob:
    """Of a model that nobody has measured."""
    monkeypatch.setenv("FEDFIT_CACHE_DIR", str(tmp_path))
    return job_for(run_file(), PlanRules(), (1, 2, 2))


def _found(job: CalibrationJob, sent: ModelRows | None = None, **changes: Any) -> ModelRows | None:
    return find_rows(job, sent, **{"may_measure": True, "room_bytes": ROOM} | changes)


def test_its_own_rows_come_first(job: CalibrationJob, tmp_path: Path) -> None:
    """Even where the run brought others of the same key."""
    own = rows(key=job.key, base_bytes=7, private_base_bytes=5)
    save_rows(tmp_path / f"{job.key}.json", own)
    assert _found(job, rows(key=job.key)) == own


def test_rows_of_an_older_version_are_used_where_nothing_can_be_measured(job: CalibrationJob, tmp_path: Path) -> None:
    """They lack the private memory of a worker; with room, it is measured."""
    old = rows(key=job.key)
    save_rows(tmp_path / f"{job.key}.json", old)
    assert _found(job, None, may_measure=False) == old
    with pytest.raises(CalibrationNeededError):
        _found(job)


def test_rows_of_the_same_kind_of_machine_are_as_good(job: CalibrationJob) -> None:
    """The key says so; there is no margin."""
    assert _found(job, rows(key=job.key)) == rows(key=job.key)


def test_other_rows_are_not_as_good_as_a_measurement(job: CalibrationJob) -> None:
    """It may take what there is."""
    with pytest.raises(CalibrationNeededError) as needed:
        _found(job, rows())
    assert needed.value.job == replace(job, limit_bytes=ROOM)


@pytest.mark.parametrize("changes", [{"may_measure": False}, {"room_bytes": 10**8}])
def test_without_leave_or_room_to_measure_other_rows_get_a_margin(
    job: CalibrationJob, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """15 %, and a warning; without any rows there are none."""
    with caplog.at_level(logging.WARNING):
        found = _found(job, rows(), **changes)
    assert found == rows(margin=1.15)
    assert "planned with a margin of 15 %" in caplog.text
    assert _found(job, None, **changes) is None


def test_rows_of_a_run_that_make_no_sense_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """They come from the network."""
    assert sent_rows({"x-rows": {"full": to_map(rows())}}, "full") == rows()
    assert sent_rows({}, "full") is None
    assert sent_rows({"x-rows": {"full": to_map(rows())}}, "width:1/2") is None
    with caplog.at_level(logging.WARNING):
        assert sent_rows({"x-rows": {"full": {**to_map(rows()), "base_bytes": "many"}}}, "full") is None
    assert "the run's cost rows are not usable, ignored" in caplog.text
