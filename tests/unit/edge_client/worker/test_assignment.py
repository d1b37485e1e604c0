"""An assignment from end to end, each in a process of its own: what it leaves behind, and why it is declined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worker_runs import (
    CLASSES,
    change_order,
    fork_worker,
    make_work,
    read_error,
    read_update,
)

from edge_client.config.device_file import DataSection
from edge_client.data.sources import open_data
from edge_client.models import registry
from edge_client.records import TrainingPlan
from edge_client.worker.spare_memory import without_spare


def test_an_update_has_the_trained_model_and_the_received_models_evaluation(trained: Path) -> None:
    """360 samples in batches of 32 are 12 steps; the evaluation equals one computed here from the sent weights."""
    report, tensors = read_update(trained)
    assert (report.num_samples, report.steps, report.payload) == (360, 12, "params")
    assert report.evaluation is not None
    assert report.evaluation.num_samples == 90
    torch.manual_seed(0)
    sent = registry.build("small-cnn", input_shape=(1, 8, 8), num_classes=10, options={})
    assert [f"model/{name}" for name in sent.state_dict()] == [name for name in tensors if name.startswith("model/")]
    assert not torch.equal(tensors["model/head.linear.weight"], sent.state_dict()["head.linear.weight"])
    section = DataSection(source="digits", partition="iid", part=(0, 4))
    x, y = open_data(section, CLASSES, (1, 8, 8))[1].batch(range(90))
    logits = sent(x)
    expected = torch.zeros(10, 10, dtype=torch.int64)
    for truth, answer in zip(y.tolist(), logits.argmax(dim=1).tolist(), strict=True):
        expected[truth, answer] += 1
    assert torch.equal(tensors["evaluation/confusion"], expected)
    assert report.evaluation.num_correct == int(expected.trace())
    loss = nn.functional.cross_entropy(logits, y, reduction="sum").item()
    assert report.evaluation.loss_sum == pytest.approx(loss, rel=1e-5)
    assert [entry.name for entry in (trained / "state").iterdir()] == ["received.json"]  # FedAvg keeps nothing else


@pytest.mark.parametrize(
    ("run", "order", "code"),
    [
        ({"model": {"name": "resnet-of-tomorrow", "input": [1, 8, 8]}}, {}, "unknown_model"),
        ({}, {"device_file": {}}, "no_data"),
        ({}, {"device_file": {"data": {"source": "npz", "train": "/nowhere.npz"}}}, "bad_data"),
        ({}, {"budget_bytes": 100_000_000}, "nothing_fits"),
        ({}, {"budget_bytes": 0}, "nothing_fits"),
    ],
)
def test_what_a_device_cannot_do_it_declines_with_a_reason(
    tmp_path: Path, run: dict[str, Any], order: dict[str, Any], code: str
) -> None:
    """Exit 76 and a code that the coordinator understands."""
    work = make_work(tmp_path / "w", run=run, **order)
    assert fork_worker(work) == 76
    assert read_error(work)["code"] == code


def test_a_model_that_does_not_fit_the_run_is_declined(tmp_path: Path) -> None:
    """The blob's names differ from the model that the run names."""
    work = make_work(tmp_path / "w", run={"model": {"name": "mlp", "input": [1, 8, 8]}})
    other = make_work(tmp_path / "other")
    (other / "model.bin").rename(work / "model.bin")
    assert fork_worker(work) == 76
    assert read_error(work)["code"] == "names"


def _as_planned(plan: TrainingPlan | None) -> TrainingPlan:
    """Without the peak, which only a trained round can tell, and pages of files, which differ between processes."""
    assert plan is not None
    return replace(plan, budget_bytes=0, predicted_bytes=0, private_predicted_bytes=0, training_bytes=0)


def test_a_plan_alone_needs_no_model_and_sends_no_tensors(tmp_path: Path, trained: Path) -> None:
    """A dry run: a trained round's plan, without spare memory, and what the device has; 360 and 90 of 450 samples."""
    work = make_work(tmp_path / "w", train=False, evaluate=False)
    (work / "model.bin").unlink()
    assert fork_worker(change_order(work, parts={"run": str(work / "run.json")})) == 0, (work / "stderr").read_text()
    report, tensors = read_update(work)
    assert tensors == {}
    assert (report.num_samples, report.num_held, report.num_test, report.payload) == (0, 360, 90, "none")
    plan = read_update(trained)[0].plan
    assert plan is not None
    assert plan.spare_bytes > 0  # the budget is 10 GB
    assert _as_planned(report.plan) == _as_planned(without_spare(plan))
    assert report.versions.keys() == {"python", "torch"}
    assert report.peak_bytes > 0
    assert not (work / "state").exists()


def test_a_plan_alone_is_declined_like_the_training_that_would_follow(tmp_path: Path) -> None:
    """Nothing fits 100 MB."""
    work = make_work(tmp_path / "w", train=False, evaluate=False, budget_bytes=100_000_000)
    assert fork_worker(change_order(work, parts={"run": str(work / "run.json")})) == 76
    assert read_error(work)["code"] == "nothing_fits"
