"""A rehearsal in a process of its own tells what training by a plan really takes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.measuring.rehearsal import RehearsalJob, run_rehearsal
from edge_client.measuring.rehearsed import Rehearsed, Shapes, pieces_met, shapes_of
from edge_client.measuring.trial import Trial, run_trial
from edge_client.records import TrainingPlan, from_map, to_map

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured as on Linux")

KEY = "0" * 64
PLAN = TrainingPlan(microbatch=12, budget_bytes=0, predicted_bytes=0)


def _run(model: dict[str, object], method: str = "fedavg") -> RunFile:
    table = {
        "name": "test",
        "model": model,
        "classes": [str(number) for number in range(10)],
        "method": {"name": method},
        "train": {"batch": 32, "optimizer": "sgd", "momentum": 0.9},
    }
    return parse_table(RunFile, table, source="test")


RESNET = _run({"name": "resnet18", "input": [3, 32, 32], "small-stem": True})
MLP = _run({"name": "mlp", "input": [3, 32, 32], "hidden": [1024, 1024, 1024]}, "fedepth")


def _job(run: RunFile, plan: TrainingPlan, shapes: Shapes, limit_bytes: int = 0) -> RehearsalJob:
    assert run.model is not None
    return RehearsalJob(
        key=KEY, run=run, input_shape=run.model.input, plan=plan, shapes=shapes, limit_bytes=limit_bytes
    )


def _one_step_per_shape(job: RehearsalJob, folder: Path) -> Rehearsed:
    """The same with two steps: the whole batch once, and the last one."""
    (folder / "job.json").write_text(json.dumps(to_map(job)))
    code = "import sys; from edge_client.measuring import rehearsal; rehearsal._STEPS = 2; sys.exit(rehearsal.main())"
    subprocess.run([sys.executable, "-c", code, folder / "job.json", folder / "out.json"], check=True)
    return from_map(Rehearsed, json.loads((folder / "out.json").read_text()))


def test_three_steps_show_the_peak_and_one_per_shape_does_not(tmp_path: Path) -> None:
    """resnet18 has 45 MB of weights: momentum, as much again, exists only when the whole batch comes a second time.

    The trial trains two epochs of 51 samples: 12, 12, 8 and 12, 7; it evaluates 18 in pieces of 12 before.
    """
    shapes = shapes_of(PLAN, 32, 51, evaluated=pieces_met(18, 12))
    job = _job(RESNET, PLAN, shapes)
    once, thrice = _one_step_per_shape(job, tmp_path), run_rehearsal(job)
    assert RESNET.model is not None
    real = run_trial(Trial(run=RESNET, input_shape=RESNET.model.input, plan=PLAN, evaluated=12)).peak_bytes
    assert once.predicted_bytes(epochs=2) < real <= thrice.predicted_bytes(epochs=2) < 1.15 * real
    assert thrice.num_convolutions == 20  # 1 + 8 x 2 + 3 shortcuts
    assert thrice.reserved_bytes >= thrice.peak_bytes - 4 * 2**20  # file pages may be read in that were mapped before


def test_a_plan_over_its_limit_is_told_as_such() -> None:
    """Weights of 45 MB have gradients of 45 MB: 60 MB are not enough, and no error but an answer comes."""
    result = run_rehearsal(_job(RESNET, PLAN, Shapes(batch=32), limit_bytes=60 * 10**6))
    assert result.over
    assert result.peak_bytes >= 60 * 10**6


def test_every_group_has_its_three_steps() -> None:
    """Weights of 12.6, 4.2 and 4.2 MB: all at once have as much gradients and momentum, 42 MB.

    The first group has its own of both, and a later piece's gradient before it is added: 3 x 12.6 = 37.8 MB.
    """
    groups = replace(PLAN, groups=(("block1",), ("block2",), ("block3",)))
    whole, grouped = (run_rehearsal(_job(MLP, plan, Shapes(batch=32, last=11))) for plan in (PLAN, groups))
    assert 37 * 10**6 < grouped.peak_bytes < 42 * 10**6 < whole.peak_bytes < 60 * 10**6
    assert min(whole.sample_s, grouped.sample_s, whole.step_s, grouped.step_s) > 0
