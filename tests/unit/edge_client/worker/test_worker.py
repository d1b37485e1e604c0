"""The worker process: what it leaves behind, and how it ends. Each test starts real processes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aggregator_jobs import do_job
from PIL import Image
from torch import nn
from worker_runs import CLASSES, DIGITS, make_work, read_error, read_update, run_worker

from coordinator.cli.methods import describe_method
from coordinator.conductor.intake import Expected, check_header
from edge_client.config.files import DataSection, parse_table
from edge_client.config.run_file import RunFile
from edge_client.data.sources import open_data
from edge_client.methods import registry as methods
from edge_client.models import registry
from edge_client.records import TrainingPlan, from_map, to_map
from edge_client.wire.container import read_header
from edge_client.wire.tensors import ContainerReader, write_container
from edge_client.worker import assignment
from edge_client.worker import live_files as notes
from edge_client.worker import process as worker


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One round on the digits with SGD, evaluated before it was trained."""
    work = make_work(tmp_path_factory.mktemp("worker") / "w")
    assert run_worker(work) == 0, (work / "stderr").read_text()
    return work


def test_data_that_is_larger_than_the_budget_is_not_unpacked_first(tmp_path: Path) -> None:
    """300 MB of zeros in a small file, on top of a warm process, and a budget of 350 MB: the device never has both."""
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros((30_000, 100, 100), np.uint8), y=np.zeros(30_000, np.int64))
    data = {"source": "npz", "train": str(tmp_path / "d.npz")}
    model = {"model": {"name": "small-cnn", "input": [1, 100, 100]}}
    work = make_work(tmp_path / "w", run=model, device_file={"data": data}, budget_bytes=350 * 10**6)
    # started by a small process: the peak of a forked child begins with its parent's size
    between = (
        "import resource, subprocess, sys\ncode = subprocess.call(sys.argv[1:], stderr=subprocess.DEVNULL)\n"
        "print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", between, sys.executable, "-m", "edge_client.worker.process", str(work)]
    code, peak_kb = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert code == "76"
    told = json.loads((work / "error.json").read_text())
    assert (told["code"], told["detail"].partition(";")[0]) == (
        "nothing_fits",
        "its data alone needs more than the budget of 350 MB",
    )
    assert int(peak_kb) * 1024 < 400 * 10**6


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


def test_training_learns(tmp_path: Path, trained: Path) -> None:
    """20 epochs end with a mean loss below that of one."""
    work = make_work(tmp_path / "w", run={"train": {"epochs": 20, "batch": 16}}, evaluate=False)
    assert run_worker(work) == 0
    report, tensors = read_update(work)
    assert report.scalars["loss"] < 0.5 * read_update(trained)[0].scalars["loss"]
    assert report.evaluation is None
    assert "evaluation/confusion" not in tensors


def test_a_killed_worker_repeated_gives_the_same_tensors_bit_for_bit(tmp_path: Path, trained: Path) -> None:
    """Killed at the fifth step and again before the manifest's rename: no manifest; the third run ends as if alone."""
    work = make_work(tmp_path / "w")
    log = str(tmp_path / "faults")
    for fault in ("kill:worker.train.step:5@3", "kill:worker.manifest.rename"):
        assert run_worker(work, FEDFIT_FAULT=fault, FEDFIT_FAULT_LOG=log) == -signal.SIGKILL
        assert not (work / "update.json").exists()
    assert run_worker(work) == 0
    _, tensors = read_update(work)
    _, expected = read_update(trained)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_a_lossy_codec_sends_deltas(tmp_path: Path, trained: Path) -> None:
    """Sent + delta is the fp32 run's model within half precision of the delta.

    `coordinator methods show` tells the length of such an update; numbers of the report are a few bytes longer or not.
    """
    work = make_work(tmp_path / "w", run={"rounds": {"codec": "fp16"}}, evaluate=False)
    assert run_worker(work) == 0
    report, tensors = read_update(work)
    assert report.payload == "delta"
    _, expected = read_update(trained)
    with ContainerReader(work / "model.bin") as sent:
        for name, delta in tensors.items():
            torch.testing.assert_close(sent.tensor(name) + delta, expected[name], rtol=0, atol=1e-4)
    size = {"model": "small-cnn", "input_shape": (1, 8, 8), "num_classes": 10, "codec": "fp16"}
    told = describe_method("fedavg", {}, **size)["bytes_up"]
    assert (work / "update.bin").stat().st_size == pytest.approx(told, abs=64)  # headers are multiples of 64


def test_evaluation_alone_sends_no_weights_and_tells_its_progress(tmp_path: Path) -> None:
    """First and last line of each phase are there, whatever the throttle."""
    work = make_work(tmp_path / "w", train=False)
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "edge_client.worker.process", str(work)]
    environment = os.environ | {"FEDFIT_PROGRESS_FD": str(write_end)}
    process = subprocess.Popen(command, env=environment, pass_fds=[write_end])
    os.close(write_end)
    with open(read_end, encoding="utf-8") as lines:
        progress = [json.loads(line) for line in lines]
    assert process.wait() == 0
    report, tensors = read_update(work)
    assert (report.payload, report.num_samples, report.steps) == ("none", 0, 0)
    assert list(tensors) == ["evaluation/confusion"]
    told = [(line["phase"], line["step"], line["total"]) for line in progress]
    assert told[:2] == [("load", 0, 1), ("load", 1, 1)]
    assert told[2] == ("evaluate", 1, 3)  # 90 samples in pieces of 32
    assert told[-3:] == [("evaluate", 3, 3), ("write", 0, 1), ("write", 1, 1)]


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
    assert run_worker(work) == 76
    assert read_error(work)["code"] == code


def test_a_model_that_does_not_fit_the_run_is_declined(tmp_path: Path) -> None:
    """The blob's names differ from the model that the run names."""
    work = make_work(tmp_path / "w", run={"model": {"name": "mlp", "input": [1, 8, 8]}})
    other = make_work(tmp_path / "other")
    (other / "model.bin").rename(work / "model.bin")
    assert run_worker(work) == 76
    assert read_error(work)["code"] == "names"


def test_a_full_disk_ends_with_74(tmp_path: Path) -> None:
    """As the daemon's own writes: it passes alone when there is space again."""
    work = make_work(tmp_path / "w")
    assert run_worker(work, FEDFIT_FAULT="enospc:worker.update.write") == 74
    assert read_error(work)["code"] == "disk_full"


def _images(folder: Path) -> dict[str, Any]:
    """600 random images of 3x32x32 that stay on disk."""
    rng = np.random.default_rng(1)
    np.savez(folder / "c.npz", x=rng.integers(0, 256, (600, 3, 32, 32), dtype=np.uint8), y=rng.integers(0, 10, 600))
    return {"data": {"source": "npz", "train": str(folder / "c.npz")}}


def _large_run(batch: int) -> dict[str, Any]:
    return {"model": {"name": "small-cnn", "input": [3, 32, 32]}, "train": {"batch": batch, "max_steps": 2}}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is the Linux kernel's")
def test_a_plan_beyond_the_budget_fails_cleanly_with_75(tmp_path: Path) -> None:
    """512 samples at once need 229 MB of activations; the budget leaves 30 MB. What was tried is told."""
    plan = {"microbatch": 512, "budget_bytes": 290_000_000, "predicted_bytes": 0, "training_bytes": 7}
    device = _images(tmp_path)
    work = make_work(
        tmp_path / "w", run=_large_run(512), device_file=device, budget_bytes=290_000_000, plan=plan, evaluate=False
    )
    assert run_worker(work) == 75
    assert not (work / "update.bin").exists()
    assert read_error(work)["code"] == "over_budget"
    trial = notes.read_trial(work)
    assert trial is not None
    assert (trial.budget_bytes, trial.plan) == (290_000_000, from_map(TrainingPlan, plan))


def test_a_plan_that_no_longer_fits_is_made_anew(tmp_path: Path) -> None:
    """Made for 2 GB, given to a device that has 400 MB now; a plan that still fits is kept as it is."""
    device = _images(tmp_path)
    given = {"microbatch": 512, "budget_bytes": 2 * 10**9, "predicted_bytes": 1_900_000_000}
    options: dict[str, Any] = {"device_file": device, "budget_bytes": 400_000_000, "evaluate": False}
    work = make_work(tmp_path / "w", run=_large_run(512), plan=given, **options)
    assert run_worker(work) == 0, (work / "stderr").read_text()
    made = read_update(work)[0].plan
    assert made is not None
    assert made.predicted_bytes <= made.budget_bytes == 400_000_000
    assert made.microbatch < 512
    kept = {"microbatch": 3, "budget_bytes": 2 * 10**9, "predicted_bytes": 400_000_000}
    work = make_work(tmp_path / "kept", run=_large_run(512), plan=kept, **options)
    assert run_worker(work) == 0
    assert read_update(work)[0].plan == from_map(TrainingPlan, kept)


def _planned(work: Path) -> TrainingPlan:
    """The plan that a worker would train with."""
    _order(work, train=False, evaluate=False)
    assert run_worker(work) == 0, (work / "stderr").read_text()
    plan = read_update(work)[0].plan
    assert plan is not None
    return plan


def test_a_plan_stays_below_what_went_over_the_budget_before(tmp_path: Path) -> None:
    """In this lease, or in another run of the same model with another name, seed and learning rate; not of any model.

    A plan of the assignment is not above it either, and not one that does not say what it needs; nor one that was made
    when there was much less memory than now.
    """
    options: dict[str, Any] = {"device_file": _images(tmp_path), "budget_bytes": 400_000_000}
    first = make_work(tmp_path / "first", run=_large_run(512), **options)
    _order(first, plan={"microbatch": 3, "budget_bytes": 300_000_000, "predicted_bytes": 1, "training_bytes": 1})
    whole = _planned(first)  # not 3: made for 300 MB
    assert 3 < whole.microbatch < 512
    smaller = make_work(tmp_path / "smaller", run=_large_run(512), plan=to_map(whole), **options)
    _order(smaller, ceiling_bytes=whole.training_bytes)
    assert _planned(smaller).microbatch == whole.microbatch // 2
    key = _key(first)
    other = _large_run(512) | {"seed": 9, "name": "other"}
    other["train"] = {**other["train"], "lr": 0.7}
    later = make_work(tmp_path / "later", run=other, **options, ceilings={key: whole.training_bytes})
    _order(later, plan={**to_map(whole), "training_bytes": 0})
    assert _planned(later).microbatch == whole.microbatch // 2
    assert _key(later) == key
    different = make_work(tmp_path / "different", run=_large_run(256), **options)
    assert _key(different) != key


def _key(work: Path) -> str:
    return assignment.memory_key(from_map(RunFile, json.loads((work / "run.json").read_text())), "full")


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_a_worker_that_is_told_of_less_memory_shrinks_its_plan_and_stays_below(tmp_path: Path) -> None:
    """128 samples at once need about 320 MB, and there are 500; then 305, before the first batch: fewer at a time."""
    work = make_work(tmp_path / "w", run=_large_run(128), device_file=_images(tmp_path), budget_bytes=500_000_000)
    notes.tell_budget(work, 305_000_000)
    assert run_worker(work) == 0, (work / "stderr").read_text()
    report, _ = read_update(work)
    assert report.plan is not None
    assert (report.plan.budget_bytes, report.scalars["replans"]) == (305_000_000, 1.0)
    assert report.plan.microbatch < 128
    assert 250_000_000 < report.peak_bytes <= 305_000_000
    trial = notes.read_trial(work)
    assert trial is not None
    assert (trial.plan, trial.budget_bytes) == (report.plan, 305_000_000)


def test_a_worker_goes_on_as_it_is_when_its_plan_fits_less_memory_or_nothing_does(tmp_path: Path) -> None:
    """600 MB are enough for its plan: only the limit changes. In 100 MB nothing fits: that is said, and no more."""
    options: dict[str, Any] = {"run": _large_run(128), "device_file": _images(tmp_path), "budget_bytes": 10**9}
    for told, expected in ((600_000_000, 600_000_000), (100_000_000, 10**9)):
        work = make_work(tmp_path / str(told), **options)
        notes.tell_budget(work, told)
        assert run_worker(work) == 0, (work / "stderr").read_text()
        report, _ = read_update(work)
        assert report.plan is not None
        assert (report.plan.microbatch, report.plan.budget_bytes) == (128, expected)
        assert report.scalars["replans"] == 0.0
        assert ("no smaller plan fits" in (work / "stderr").read_text()) == (told == 100_000_000)


_MEASURED = """
import sys
from edge_client.device import meter
from edge_client.worker import process
code = process.main(sys.argv[1:])
print(meter.peak_rss_bytes())
sys.exit(code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_a_model_far_beyond_the_budget_is_declined_before_it_is_built(tmp_path: Path) -> None:
    """Three layers of 16384 are 538 million parameters, 2.2 GB; the process stays below 300 MB, as any worker."""
    work = make_work(tmp_path / "w", budget_bytes=300_000_000)
    table = {"name": "t", "classes": CLASSES}
    table["model"] = {"name": "mlp", "input": [1, 8, 8], "hidden": [16384] * 3}
    (work / "run.json").write_text(json.dumps(to_map(parse_table(RunFile, table, source="test"))))
    assert _measured(work) == (76, True)
    assert read_error(work)["code"] == "nothing_fits"


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_a_sample_far_beyond_the_budget_ends_the_worker_before_the_devices_memory_ends(tmp_path: Path) -> None:
    """The first convolution of one sample puts out 32 x 4096 x 4096 floats, 2.1 GB; building the model runs it."""
    np.savez(tmp_path / "c.npz", x=np.zeros((5, 1, 4096, 4096), dtype=np.uint8), y=np.arange(5))
    work = make_work(tmp_path / "w", budget_bytes=300_000_000)
    work_run = {"name": "t", "classes": CLASSES, "model": {"name": "small-cnn", "input": [1, 4096, 4096]}}
    (work / "run.json").write_text(json.dumps(to_map(parse_table(RunFile, work_run, source="test"))))
    order = json.loads((work / "order.json").read_text())
    order["device_file"] = {"data": {"source": "npz", "train": str(tmp_path / "c.npz")}}
    (work / "order.json").write_text(json.dumps(order))
    assert _measured(work)[0] == 75


def _measured(work: Path) -> tuple[int, bool]:
    """The exit code, and whether the worker's memory stayed below 300 MB."""
    command = [sys.executable, "-c", _MEASURED, str(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, int(done.stdout) < 300_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
@pytest.mark.parametrize("batch", [1, 32, 128])
def test_the_measured_peak_stays_below_the_prediction(tmp_path: Path, batch: int) -> None:
    """The worker plans for its own budget, trains inside it under the limit, and reports its VmHWM."""
    work = make_work(tmp_path / "w", run=_large_run(batch), device_file=_images(tmp_path), budget_bytes=10**9)
    assert run_worker(work) == 0
    report, _ = read_update(work)
    assert report.plan is not None
    assert report.plan.microbatch == batch
    assert 0 < report.base_bytes <= report.peak_bytes <= report.plan.predicted_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_an_image_folder_larger_than_the_budget_is_trained_inside_it(tmp_path: Path) -> None:
    """300 PNG files of 1000x1000 pixels: 1.2 GB decoded, budget 310 MB; the peak stays below what was predicted."""
    for name in ("0", "1"):
        (tmp_path / "images" / name).mkdir(parents=True)
    Image.new("RGB", (1000, 1000), (200, 100, 50)).save(tmp_path / "one.png")
    for number in range(300):
        os.link(tmp_path / "one.png", tmp_path / "images" / str(number % 2) / f"{number}.png")
    device = {"data": {"source": "image-folder", "train": str(tmp_path / "images")}}
    work = make_work(tmp_path / "w", run=_large_run(16), device_file=device, budget_bytes=310_000_000)
    assert run_worker(work) == 0, (work / "stderr").read_text()
    report, _ = read_update(work)
    assert report.plan is not None
    assert (report.num_samples, report.num_test) == (240, 60)
    assert report.peak_bytes <= report.plan.predicted_bytes <= 310_000_000


def test_sigterm_ends_a_training_worker_with_143(tmp_path: Path) -> None:
    """As soon as it has begun to train, and without an update."""
    work = make_work(tmp_path / "w", run={"train": {"epochs": 1000}})
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "edge_client.worker.process", str(work)]
    environment = os.environ | {"FEDFIT_PROGRESS_FD": str(write_end), "FEDFIT_PARENT_PID": str(os.getpid())}
    process = subprocess.Popen(command, env=environment, pass_fds=[write_end])
    os.close(write_end)
    with open(read_end, encoding="utf-8") as lines:
        next(line for line in lines if '"train"' in line)
        process.terminate()
        assert process.wait() == 143
    assert not (work / "update.json").exists()


def test_a_second_worker_on_the_same_lease_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is the kernel's: it goes with the process that held it."""
    monkeypatch.setattr(worker, "_LOCK_WAIT_S", 0.1)
    with open(tmp_path / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not worker._lock(tmp_path / "lock")
    assert worker._lock(tmp_path / "lock")


def test_method_state_is_written_as_next_and_read_as_current(tmp_path: Path) -> None:
    """The daemon promotes it; an empty state leaves nothing, not even an older `next`."""
    folder = tmp_path / "state"
    state = {"c/head.bias": torch.tensor([1.5, -2.0]), "steps": torch.tensor(7)}
    assignment.write_state(folder, state)
    assert assignment.read_state(folder) == {}
    (folder / "next").rename(folder / "current")
    again = assignment.read_state(folder)
    assert all(torch.equal(again[name], state[name]) for name in state)
    assignment.write_state(folder, state)
    assignment.write_state(folder, {})
    assert sorted(path.name for path in folder.iterdir()) == ["current"]


def _order(work: Path, **changes: Any) -> Path:
    """Change the order of a work directory."""
    order = json.loads((work / "order.json").read_text())
    (work / "order.json").write_text(json.dumps(order | changes))
    return work


def test_a_plan_alone_needs_no_model_and_sends_no_tensors(tmp_path: Path, trained: Path) -> None:
    """A dry run: the same plan as a trained round's, and what the device has; 360 and 90 of 450 samples."""
    work = make_work(tmp_path / "w", train=False, evaluate=False)
    (work / "model.bin").unlink()
    assert run_worker(_order(work, parts={"run": str(work / "run.json")})) == 0, (work / "stderr").read_text()
    report, tensors = read_update(work)
    assert tensors == {}
    assert (report.num_samples, report.num_held, report.num_test, report.payload) == (0, 360, 90, "none")
    assert report.plan == read_update(trained)[0].plan
    assert report.versions.keys() == {"python", "torch"}
    assert report.peak_bytes > 0
    assert not (work / "state").exists()


def test_a_plan_alone_is_declined_like_the_training_that_would_follow(tmp_path: Path) -> None:
    """Nothing fits 100 MB."""
    work = make_work(tmp_path / "w", train=False, evaluate=False, budget_bytes=100_000_000)
    assert run_worker(_order(work, parts={"run": str(work / "run.json")})) == 76
    assert read_error(work)["code"] == "nothing_fits"


def test_results_that_are_not_shared_do_not_leave(tmp_path: Path) -> None:
    """Training goes on without its evaluation; an evaluation alone is declined."""
    device = {"data": DIGITS, "share": {"metrics": False}}
    work = make_work(tmp_path / "w", run={"train": {"max-steps": 1}}, device_file=device)
    assert run_worker(work) == 0
    report, tensors = read_update(work)
    assert (report.evaluation, report.num_samples) == (None, 360)
    assert "evaluation/confusion" not in tensors
    work = make_work(tmp_path / "v", train=False, device_file=device)
    assert run_worker(work) == 76
    assert read_error(work)["code"] == "not_shared"


def test_knowledge_that_would_be_refused_stays_and_the_rest_of_the_update_goes(tmp_path: Path) -> None:
    """Four inputs of 1e8: features (weights of 1) are 4e8, the limit is 1e6; logits (weights of 0) are 0 and go."""
    x, y = np.full((40, 4), 1e8, dtype=np.float32), np.arange(40) % 2
    np.savez(tmp_path / "x.npz", x=x, y=y)
    run = {
        "model": {"name": "mlp", "input": [4], "hidden": [3]},
        "classes": ["0", "1"],
        "method": {"name": "felo"},
        "train": {"max-steps": 1, "batch": 64},
    }
    data = {"source": "npz", "train": str(tmp_path / "x.npz"), "test_fraction": 0.0}
    device = {"data": data, "share": {"min_count": 10}}
    work = make_work(tmp_path / "w", run=run, evaluate=False, learning_rate=0.0, device_file=device)
    model = registry.build("mlp", input_shape=(4,), num_classes=2, options={"hidden": [3]})
    state = {name: torch.full_like(value, float(value.shape[0] == 3)) for name, value in model.state_dict().items()}
    rows = [(f"model/{name}", "fp32", tuple(tensor.shape)) for name, tensor in state.items()]
    write_container(work / "model.bin", {}, rows, state.values())
    assert run_worker(work) == 0
    _, tensors = read_update(work)
    assert {name for name in tensors if name.startswith("knowledge/")} == {
        "knowledge/class/logit/counts",
        "knowledge/class/logit/values",
    }
    assert {name for name in tensors if name.startswith("model/")} == {f"model/{name}" for name in state}
    told = read_header(work / "update.bin").meta["x-held-back"]
    assert told == "range: this device: 'values' of its 'class/feature' has values beyond 1e+06, or not finite"


@pytest.mark.parametrize(
    ("share", "told"), [({"min_count": 10}, True), ({"min_count": 10**6}, False), ({"class_statistics": False}, False)]
)
def test_classes_that_are_not_shared_are_not_told(tmp_path: Path, share: dict[str, Any], told: bool) -> None:
    """HeteroFL's mask tells which classes a device has, of those with enough samples: about 36 of each digit here."""
    run = {"train": {"max-steps": 1}, "method": {"name": "heterofl", "mask": True}}
    work = make_work(tmp_path / "w", run=run, device_file={"data": DIGITS, "share": share}, evaluate=False)
    assert run_worker(work) == 0, (work / "stderr").read_text()
    report, _ = read_update(work)
    assert {name for name in report.scalars if name.startswith("class/")} == (
        {f"class/{digit}" for digit in range(10)} if told else set()
    )


TASK = """\
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from edge_client import Task

class Squares(Dataset):
    classes = ["links", "rechts"]  # the device's own names, in the device's own order
    def __len__(self):
        return 40
    def __getitem__(self, index):
        x = torch.full((1, 2, 2), 0.1)
        x[0, 0, index % 2] = 1.0 + torch.rand(()).item() + np.random.random()
        return x, index % 2

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem, self.head = nn.Flatten(), nn.Linear(4, num_classes)
    def forward(self, x):
        return self.head(self.stem(x))

def train_data(device):
    assert (device.name, device.classes, device.labels["line"]) == ("d1", ("right", "up", "left"), "a")
    return Squares()

task = Task(model=Net, train_data=train_data, units=["stem", "head"])
"""


def make_task_work(folder: Path, text: str = TASK, *, sha256: str = "", **device: Any) -> Path:
    """A work directory for a run of the task, which lies in the folder's parent."""
    work = make_work(folder)
    path = folder.parent / f"{folder.name}.py"
    path.write_text(text)
    task = {"name": "squares", "sha256": sha256 or hashlib.sha256(text.encode()).hexdigest()}
    table = {"name": "t", "task": task, "classes": ["right", "up", "left"], "train": {"epochs": 10, "batch": 8}}
    (work / "run.json").write_text(json.dumps(to_map(parse_table(RunFile, table, source="test"))))
    values = {"model/head.weight": torch.zeros(3, 4), "model/head.bias": torch.zeros(3)}
    rows = [(name, "fp32", tuple(value.shape)) for name, value in values.items()]
    write_container(work / "model.bin", {}, rows, values.values())
    base = {
        "tasks": {"squares": f"{path}:task"},
        "rename": {"links": "left", "rechts": "right"},
        "labels": {"line": "a"},
    }
    return _order(work, device_file=base | device)


def test_a_users_own_model_and_data_are_trained(tmp_path: Path) -> None:
    """Left (2) where the first pixel is bright, right (0) where the second is; nobody has seen `up`.

    32 of 40 samples train, 8 are kept for tests. The weights of a zero model move so that each pixel speaks for its
    class; repeated, all bits are the same, although the data draws from the generators of torch and numpy.
    """
    works = [make_task_work(tmp_path / name) for name in ("w", "again")]
    assert [run_worker(work) for work in works] == [0, 0], (works[0] / "stderr").read_text()
    report, tensors = read_update(works[0])
    assert (report.num_samples, report.num_held, report.num_test, report.steps) == (32, 32, 8, 40)
    weight = tensors["model/head.weight"]
    assert (weight[:, 0].argmax().item(), weight[:, 1].argmax().item()) == (2, 0)
    assert report.evaluation is not None
    assert tensors["evaluation/confusion"].sum(dim=1)[1].item() == 0
    assert all(torch.equal(tensors[name], value) for name, value in read_update(works[1])[1].items())


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
    assert run_worker(work) == 76, (work / "stderr").read_text()
    told = read_error(work)
    assert told["code"] == code
    assert message in told["detail"]
    assert "\n" not in told["detail"]
    assert "Traceback" not in (work / "stderr").read_text()


def test_data_that_fails_in_the_middle_of_training_is_declined(tmp_path: Path) -> None:
    """Its labels are known from `targets`, so the broken sample is first read by the training."""
    text = TASK.replace("x = torch.full", "x = [].pop() if index == 7 else torch.full").replace(
        "    def __len__", "    targets = [0, 1] * 20\n    def __len__"
    )
    work = make_task_work(tmp_path / "w", text, data={"test_fraction": 0.0})
    assert run_worker(work) == 76
    assert read_error(work)["code"] == "bad_data"
    assert "line 13: train_data(): sample 7: IndexError: pop from empty list" in read_error(work)["detail"]


BLOCKS = [f"block{number}" for number in range(1, 10)]


def make_deep_work(folder: Path, *, codec: str = "fp32", **plan: Any) -> Path:
    """m-FeDepth over FedProx on a narrow PreResNet-20, with the model that the aggregator makes for it."""
    run = {
        "method": {"name": "m-fedepth+fedprox", "mu": 0.01, "mutual": 2},
        "model": {"name": "preresnet20", "input": [1, 8, 8], "width": 2},
        "rounds": {"codec": codec},
        "train": {"max-steps": 6},
    }
    given = {"microbatch": 32, "budget_bytes": 10**10, "predicted_bytes": 10**9, **plan}
    work = make_work(folder, run=run, plan=given, evaluate=False)
    job = {"id": 1, "job": "init", "run": json.loads((work / "run.json").read_text()), "out": str(work / "model.bin")}
    reply = do_job(job)
    assert reply["ok"], reply
    return work


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_groups_are_trained_by_plan_and_only_they_are_sent(tmp_path: Path, codec: str) -> None:
    """block1 skipped, groups to block5 and block9, two models, activations on disk: three steps for each group.

    The update lacks stem, block1 and all heads but block5's, passes intake and check, and moved what it has; the peer
    is kept for the next round.
    """
    groups = {"groups": [BLOCKS[1:5], BLOCKS[5:]], "skipped": BLOCKS[:1]}
    work = make_deep_work(tmp_path / "w", codec=codec, buffered=True, num_models=2, **groups)
    assert run_worker(work) == 0, (work / "stderr").read_text()
    report, tensors = read_update(work)
    assert report.steps == 6
    with ContainerReader(work / "model.bin") as reader:
        sent = {name: reader.tensor(name) for name in reader.names()}
        base = reader.header
    assert [name for name in sent if name not in tensors] == [
        name
        for name in sent
        if name.startswith(("model/stem.", "model/block1."))
        or (name.startswith("extra/") and not name.startswith("extra/block5."))
    ]
    start = sent if codec == "fp32" else {name: torch.zeros_like(value) for name, value in sent.items()}
    assert [name for name, value in tensors.items() if torch.equal(value, start[name])] == []
    rules = methods.plan_rules("m-fedepth+fedprox", {"mutual": 2})
    expected = Expected(
        device="d1", round=3, base=base, codec=codec, train=True, evaluate=False, num_samples=360, max_samples=10**6,
        num_classes=10, epochs=1, rules=rules,
    )  # fmt: skip
    assert check_header(work / "update.bin", expected).plan == report.plan
    check = {"job": "check", "base": str(work / "model.bin"), "update": str(work / "update.bin"), "max_passes": 32}
    assert do_job(check)["ok"]
    (work / "state/next").rename(work / "state/current")
    kept = assignment.read_state(work / "state")
    assert {name.partition(".")[0] for name in kept} == {"peer/1", "peer/1/extra/block5"}
    assert sorted(path.name for path in work.iterdir() if not path.name.endswith((".json", ".bin"))) == [
        "lock",
        "state",
        "stderr",
    ]


def test_a_full_disk_while_activations_are_kept_ends_with_74(tmp_path: Path) -> None:
    """As any other full disk: the daemon waits for space and starts again."""
    work = make_deep_work(tmp_path / "w", buffered=True, groups=[BLOCKS[:5], BLOCKS[5:]])
    assert run_worker(work, FEDFIT_FAULT="enospc:worker.train.buffer:2") == 74
    reason = read_error(work)
    assert reason["code"] == "disk_full"
    assert "keeping activations in" in reason["detail"]


def test_a_bypass_that_cannot_be_is_declined(tmp_path: Path) -> None:
    """The shapes stand in the reason."""
    work = make_deep_work(tmp_path / "w", groups=[BLOCKS[4:]], skipped=BLOCKS[:4])
    run = json.loads((work / "run.json").read_text())
    run["method"]["parameters"]["bypass"] = True
    (work / "run.json").write_text(json.dumps(run))
    assert run_worker(work) == 76
    reason = read_error(work)
    assert (reason["code"], "'block5' takes [4, 4, 4]" in reason["detail"]) == ("bad_method", True)
