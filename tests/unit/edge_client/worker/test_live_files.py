"""What daemon and worker leave each other in the work directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rows import PLAN, digest

from edge_client.records import Ceiling
from edge_client.worker import live_files

TRIAL = live_files.Trial(key=digest("model"), budget_bytes=7, plan=replace(PLAN, training_bytes=5))


def test_the_daemon_reads_what_the_worker_tries(tmp_path: Path) -> None:
    """The newest; what it means if that was too much; nothing after the folder was cleared for the next worker."""
    assert live_files.read_trial(tmp_path) is None
    live_files.write_trial(tmp_path, replace(TRIAL, budget_bytes=9))
    live_files.write_trial(tmp_path, TRIAL)
    found = live_files.read_trial(tmp_path)
    assert found == TRIAL
    assert found.exceeded() == Ceiling(key=digest("model"), training_bytes=5, budget_bytes=7)
    live_files.write_budget(tmp_path, 5)
    live_files.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []
    live_files.clear(tmp_path)


def test_a_plan_that_does_not_say_what_it_needs_teaches_nothing() -> None:
    """An older coordinator's plans: there is nothing to stay below."""
    assert replace(TRIAL, plan=PLAN).exceeded() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 9999, '{"key": 1}'])
def test_a_note_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    """A worker may die at any moment, and a user's code in it may write anything."""
    for name in ("plan.json", "budget.json"):
        (tmp_path / name).write_text(text)
    assert live_files.read_trial(tmp_path) is None
    assert live_files.BudgetFile(tmp_path).new_budget() is None


def test_the_worker_hears_each_budget_once(tmp_path: Path) -> None:
    """A file with another time is news."""
    note = live_files.BudgetFile(tmp_path)
    assert note.new_budget() is None
    live_files.write_budget(tmp_path, 5)
    assert (note.new_budget(), note.new_budget()) == (5, None)
