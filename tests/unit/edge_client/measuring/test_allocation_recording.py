"""Recorded allocations, replayed, against what the test accelerator reserves for the same training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerated import discrete, needs_test_accelerator

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.measuring import allocation_recording
from edge_client.measuring.prepared_training import prepare
from edge_client.planning.allocation_sequence import Sizes, reserved
from edge_client.records import TrainingPlan
from edge_client.training.loop import train

pytestmark = needs_test_accelerator()

SMALL_CNN = {"name": "small-cnn", "input": [3, 32, 32]}
MLP = {"name": "mlp", "input": [3, 16, 16], "hidden": [512, 512]}


def _run(model: dict[str, Any], method: str, **train: Any) -> RunFile:
    table = {"name": "t", "model": model, "classes": [str(number) for number in range(10)], "train": train}
    return parse_table(RunFile, table | {"method": {"name": method}}, source="test")


def _plan(**fields: Any) -> TrainingPlan:
    return TrainingPlan(budget_bytes=0, predicted_bytes=0, **fields)


@pytest.mark.parametrize(
    ("model", "method", "settings", "plan"),
    [
        (SMALL_CNN, "fedavg", {"batch": 32}, _plan(microbatch=32)),
        (SMALL_CNN, "fedprox", {"batch": 50, "optimizer": "adam"}, _plan(microbatch=16)),
        (MLP, "fedavg", {"batch": 64, "momentum": 0.9}, _plan(microbatch=64)),
        (MLP, "scaffold", {"batch": 64}, _plan(microbatch=8)),
    ],
    ids=("whole", "pieces", "wide", "controls"),
)
def test_the_replay_is_what_the_allocator_reserves(
    model: dict[str, Any], method: str, settings: dict[str, Any], plan: TrainingPlan
) -> None:
    """Recorded with 6 and 12 samples a piece on the CPU; replayed for up to 64, two epochs and a smaller last batch.

    The peaks are equal, because the test accelerator runs the CPU's kernels; but for a small segment of 2 MiB where a
    batch has more pieces than were recorded.
    """
    torch.set_num_threads(1)
    run = _run(model, method, **settings)
    prepared = prepare(run, model["input"])
    job = allocation_recording.job_for(run, "model", model["input"], plan)
    sequence = allocation_recording.record(prepared, job)
    batch = settings["batch"]
    num_samples = 2 * batch + batch // 2 + 3
    predicted = reserved(sequence, Sizes.of(batch=batch, microbatch=plan.microbatch, num_samples=num_samples))

    device = discrete()
    device.limit(None)
    device.free()
    there = replace(prepared, model=device.move(prepared.model))
    device.reset_peak()
    client = there.client(plan, epochs=2)
    train(there.model, client, there.samples(num_samples), there.settings(batch, plan))
    client.end()
    excess = predicted.peak_reserved_bytes - device.peak_reserved_bytes()
    assert excess in ((0, 2 * 2**20) if method == "scaffold" else (0,))


def test_groups_are_phases_after_which_the_cache_is_given_back() -> None:
    """Two groups of fedepth: as many segments are given back as there are turns between groups."""
    torch.set_num_threads(1)
    run = _run({"name": "mlp", "input": [3, 16, 16], "hidden": [64, 64, 64]}, "fedepth", batch=8)
    prepared = prepare(run, [3, 16, 16])
    blocks = [unit.name for unit in prepared.model.units if unit.kind == "block"]
    plan = _plan(microbatch=8, groups=tuple((name,) for name in blocks))
    job = allocation_recording.job_for(run, "model", [3, 16, 16], plan)
    sequence = allocation_recording.record(prepared, job)
    assert sequence.numbers.count(0) == len(blocks) - 1
    assert "3" in sequence.pieces  # of the frozen units: a chunk


def test_another_way_to_train_has_another_key() -> None:
    """Sizes are not in it: a sequence serves all of them; whether a batch has pieces is."""
    run = _run(SMALL_CNN, "fedavg", batch=32)

    def key(**fields: Any) -> str:
        return allocation_recording.job_for(run, "model", [3, 32, 32], _plan(**fields)).key

    assert key(microbatch=16) == key(microbatch=8)
    assert len({key(microbatch=32), key(microbatch=16), key(microbatch=16, recompute="units")}) == 3
