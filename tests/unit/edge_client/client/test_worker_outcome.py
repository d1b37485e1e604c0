"""What a worker left in its folder, and what that means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rows import PLAN, digest

from edge_client.client.events import WorkerFailed
from edge_client.client.worker_outcome import finished_update, outcome, saved_failure
from edge_client.records import Ceiling
from edge_client.worker import exit_codes, live_files

TRIAL = live_files.Trial(key=digest("model"), budget_bytes=7, plan=replace(PLAN, training_bytes=5))
EXCEEDED = Ceiling(key=digest("model"), training_bytes=5, budget_bytes=7)


@pytest.mark.parametrize(
    "manifest", ["", "[]", '{"sha256": "x", "length": 3, "num_samples": 1}', '{"sha256": 1}', '{"length": 3.0}']
)
def test_half_an_update_is_none(tmp_path: Path, manifest: str) -> None:
    """A worker that says it is done and is not has crashed."""
    (tmp_path / "update.bin").write_bytes(b"abc")
    (tmp_path / "update.json").write_text(manifest)
    assert finished_update(tmp_path) is None
    failed = outcome("lease-1", tmp_path, exit_codes.DONE)
    assert isinstance(failed, WorkerFailed)
    assert (failed.code, failed.final) == ("crashed", False)


@pytest.mark.parametrize("length", [2, 4])
def test_an_update_of_another_length_is_none(tmp_path: Path, length: int) -> None:
    """Three bytes are there."""
    (tmp_path / "update.bin").write_bytes(b"abc")
    manifest = {"sha256": digest("u"), "length": length, "num_samples": 1}
    (tmp_path / "update.json").write_text(json.dumps(manifest))
    assert finished_update(tmp_path) is None


@pytest.mark.parametrize(
    ("code", "expected", "final"),
    [(74, "disk_full", False), (75, "over_budget", True), (76, "declined", True), (1, "crashed", False)],
)
def test_exit_codes_tell_how_it_ended(tmp_path: Path, code: int, expected: str, final: bool) -> None:
    """Over budget and declined are final: the next try would end the same."""
    failed = outcome("lease-1", tmp_path, code)
    assert isinstance(failed, WorkerFailed)
    assert (failed.code, failed.final) == (expected, final)
    assert failed.detail == f"the worker ended with exit code {code}"


def test_what_a_worker_left_before_the_daemon_died_is_known(tmp_path: Path) -> None:
    """It said over_budget and what it tried; anything less is tried again as it was."""
    assert saved_failure("lease-1", tmp_path) is None
    live_files.write_trial(tmp_path, TRIAL)
    assert saved_failure("lease-1", tmp_path) is None
    (tmp_path / "error.json").write_text('{"code": "disk_full", "detail": "x"}')
    assert saved_failure("lease-1", tmp_path) is None
    (tmp_path / "error.json").write_text('{"code": "over_budget", "detail": "x"}')
    failed = WorkerFailed(lease="lease-1", code="over_budget", detail="x", exceeded=EXCEEDED)
    assert saved_failure("lease-1", tmp_path) == failed
    live_files.clear(tmp_path)
    assert saved_failure("lease-1", tmp_path) is None
