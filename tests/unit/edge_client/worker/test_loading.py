"""From an assignment to the settings of its training, and what is declined before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worker_runs import DIGITS, make_work

from edge_client.records import TrainingPlan, WorkOrder, from_map
from edge_client.worker.allowance import Allowance
from edge_client.worker.declined import DeclinedError
from edge_client.worker.loading import load, loop_settings
from edge_client.worker.order_files import Assignment, read_assignment
from edge_client.worker.process_cache import ProcessCache


def _assignment(folder: Path, run: dict[str, Any] | None = None, **order: Any) -> Assignment:
    work = make_work(folder, run=run, **order)
    written = from_map(WorkOrder, json.loads((work / "order.json").read_text()))
    return read_assignment(written, work, ProcessCache())


def test_the_loop_trains_as_the_run_says_in_the_pieces_of_the_plan(tmp_path: Path) -> None:
    """Batch and optimizer are the run's, microbatch, type and buffers the plan's; without one a batch is one piece."""
    run = {"train": {"batch": 32, "optimizer": "sgd", "momentum": 0.5, "max-steps": 7}}
    assignment = _assignment(tmp_path / "w", run, learning_rate=0.25, seed=11)
    settings = loop_settings(assignment, channels_last=True)
    assert (settings.batch, settings.microbatch, settings.dtype, settings.buffered) == (32, 32, "fp32", False)
    assert (settings.optimizer, settings.momentum, settings.max_steps) == ("sgd", 0.5, 7)
    assert (settings.learning_rate, settings.seed, settings.channels_last) == (0.25, 11, True)
    plan = TrainingPlan(
        groups=(("stem",),), microbatch=4, buffered=True, dtype="bf16", budget_bytes=9, predicted_bytes=8
    )
    planned = loop_settings(assignment, plan, channels_last=False)
    assert planned == replace(settings, microbatch=4, dtype="bf16", buffered=True, channels_last=False)


def test_only_the_first_round_of_a_run_with_a_warm_up_warms_up(tmp_path: Path) -> None:
    """Rounds are counted from 1."""
    rounds = {
        number: _assignment(tmp_path / str(number), {"train": {"warm-up": True}}, round=number) for number in (1, 2)
    }
    assert [loop_settings(rounds[number], channels_last=False).warm_up for number in (1, 2)] == [True, False]


def test_what_the_owner_does_not_share_is_declined_before_any_data_is_opened(tmp_path: Path) -> None:
    """The data of this device does not exist, which nobody notices."""
    device = {"data": {**DIGITS, "source": "npz", "train": "/nowhere.npz"}, "share": {"metrics": False}}
    assignment = _assignment(tmp_path / "w", train=False, device_file=device)
    with pytest.raises(DeclinedError) as caught:
        load(assignment, Allowance(10**10, assignment.workdir), ProcessCache())
    assert caught.value.code == "not_shared"
