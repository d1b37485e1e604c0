"""The update: its payload by codec, and its report, its manifest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from worker_runs import (
    fork_worker,
    make_work,
    read_error,
    read_update,
    run_worker,
)

from coordinator.cli.methods import describe_method
from edge_client.config.device_file import DataSection
from edge_client.data.sources import open_data
from edge_client.methods.base import Outcome
from edge_client.records import TrainingPlan
from edge_client.training.loop import Trained
from edge_client.wire.container import read_header
from edge_client.wire.tensors import ContainerReader
from edge_client.worker.allowance import Measured
from edge_client.worker.device_data import DeviceData
from edge_client.worker.local_training import LocalTraining
from edge_client.worker.update import Results, make_report, write_manifest, write_update

MEMORY = Measured(base_bytes=6, peak_bytes=7, peak_rss_bytes=9, file_bytes=2)


def test_a_lossy_codec_sends_deltas(tmp_path: Path, trained: Path) -> None:
    """Sent + delta is the fp32 run's model within half precision of the delta.

    `coordinator methods show` tells the length of such an update; numbers of the report are a few bytes longer or not.
    """
    work = make_work(tmp_path / "w", run={"rounds": {"codec": "fp16"}}, evaluate=False)
    assert fork_worker(work) == 0
    report, tensors = read_update(work)
    assert report.payload == "delta"
    _, expected = read_update(trained)
    with ContainerReader(work / "model.bin") as sent:
        for name, delta in tensors.items():
            torch.testing.assert_close(sent.tensor(name) + delta, expected[name], rtol=0, atol=1e-4)
    size = {"model": "small-cnn", "input_shape": (1, 8, 8), "num_classes": 10, "codec": "fp16"}
    told = describe_method("fedavg", {}, **size)["bytes_up"]
    assert (work / "update.bin").stat().st_size == pytest.approx(told, abs=64)  # headers are multiples of 64


def test_a_full_disk_ends_with_74(tmp_path: Path) -> None:
    """As the daemon's own writes: it passes alone when there is space again."""
    work = make_work(tmp_path / "w")
    assert run_worker(work, FEDFIT_FAULT="enospc:worker.update.write") == 74
    assert read_error(work)["code"] == "disk_full"


PLAN = TrainingPlan(microbatch=4, budget_bytes=9, predicted_bytes=8)


@pytest.fixture
def data(tmp_path: Path) -> DeviceData:
    """5 samples to train on, 2 to test with."""
    for name, num_samples in (("train", 5), ("test", 2)):
        y = np.arange(num_samples) % 2
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((num_samples, 3), np.float32), y=y)
    section = DataSection(source="npz", train=str(tmp_path / "train.npz"), test=str(tmp_path / "test.npz"))
    train, test = open_data(section, ("0", "1"), (3,))
    return DeviceData(train=train, test=test)


def test_a_report_of_a_dry_run_has_the_plan_and_what_the_device_holds(data: DeviceData) -> None:
    """5 samples to train on and 2 to test with, none used; no weights are sent."""
    report = make_report(Results(plan=PLAN), data, codec="fp16", memory=MEMORY, seconds=1.23456)
    assert (report.num_samples, report.num_held, report.num_test, report.steps) == (0, 5, 2, 0)
    assert (report.payload, report.evaluation, report.scalars) == ("none", None, {})
    assert (report.private_peak_bytes, report.private_base_bytes, report.seconds) == (7, 6, 1.235)
    assert (report.peak_bytes, report.base_bytes) == (9, 8)  # RSS, for older coordinators


def test_a_reported_plan_counts_private_memory_and_for_older_coordinators_rss(data: DeviceData) -> None:
    """2 bytes of file pages are a step of 64 MiB: what is compared with the highest RSS has them on top."""
    report = make_report(Results(plan=PLAN), data, codec="fp16", memory=MEMORY, seconds=1.0)
    pages = 64 * 2**20
    assert report.plan == replace(
        PLAN,
        budget_bytes=PLAN.budget_bytes + pages,
        predicted_bytes=PLAN.predicted_bytes + pages,
        private_budget_bytes=PLAN.budget_bytes,
        private_predicted_bytes=PLAN.predicted_bytes,
    )
    memory = report.memory
    assert (memory.peak_bytes, memory.base_bytes, memory.budget_bytes) == (7, 6, PLAN.budget_bytes)
    old = replace(report, private_peak_bytes=0, private_base_bytes=0, plan=PLAN).memory  # as a 0.1 client tells it
    assert (old.peak_bytes, old.base_bytes, old.budget_bytes) == (9, 8, PLAN.budget_bytes)


@pytest.mark.parametrize(("loss", "shown"), [(0.25, {"loss": 0.25}), (float("nan"), {})])
def test_a_report_of_training_has_the_methods_numbers_and_a_loss_that_is_finite(
    data: DeviceData, loss: float, shown: dict[str, float]
) -> None:
    """3 steps, replanned once; a lossy codec sends differences."""
    training = LocalTraining(trained=Trained(steps=3, mean_loss=loss), outcome=Outcome(scalars={"mine": 2.0}))
    results = Results(plan=PLAN, num_replans=1, training=training)
    report = make_report(results, data, codec="fp16", memory=MEMORY, seconds=1.0)
    assert (report.num_samples, report.steps, report.payload) == (5, 3, "delta")
    assert report.scalars == {"mine": 2.0, "replans": 1.0, **shown}


def test_there_is_a_manifest_only_where_there_is_an_update(tmp_path: Path, data: DeviceData) -> None:
    """It has the hash and the length of the file; knowledge that stayed is named in the update's header."""
    report = make_report(Results(plan=PLAN), data, codec="fp32", memory=MEMORY, seconds=1.0)
    work = tmp_path / "w"
    work.mkdir()
    manifest = write_update(work, report, [], codec="fp32", withheld=["range: a", "rows: b"])
    assert [path.name for path in work.iterdir()] == ["update.bin"]
    assert read_header(work / "update.bin").meta["x-held-back"] == "range: a; rows: b"
    write_manifest(work, manifest)
    assert read_update(work) == (report, {})
