"""Evaluation and training in a worker: real processes, whole models and groups of blocks, tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from aggregator_jobs import do_job
from worker_runs import (
    DIGITS,
    TASK,
    fork_worker,
    make_task_work,
    make_work,
    read_error,
    read_update,
    run_worker,
)

from coordinator.conductor.intake import Expected, check_header
from edge_client.methods import registry as methods
from edge_client.wire.tensors import ContainerReader
from edge_client.worker.method_state import read_state


def test_training_learns(tmp_path: Path, trained: Path) -> None:
    """20 epochs end with a mean loss below that of one."""
    work = make_work(tmp_path / "w", run={"train": {"epochs": 20, "batch": 16}}, evaluate=False)
    assert fork_worker(work) == 0
    report, tensors = read_update(work)
    assert report.scalars["loss"] < 0.5 * read_update(trained)[0].scalars["loss"]
    assert report.evaluation is None
    assert "evaluation/confusion" not in tensors


@pytest.mark.parametrize(
    ("share", "told"), [({"min_count": 10}, True), ({"min_count": 10**6}, False), ({"class_statistics": False}, False)]
)
def test_classes_that_are_not_shared_are_not_told(tmp_path: Path, share: dict[str, Any], told: bool) -> None:
    """HeteroFL's mask tells which classes a device has, of those with enough samples: about 36 of each digit here."""
    run = {"train": {"max-steps": 1}, "method": {"name": "heterofl", "mask": True}}
    work = make_work(tmp_path / "w", run=run, device_file={"data": DIGITS, "share": share}, evaluate=False)
    assert fork_worker(work) == 0, (work / "stderr").read_text()
    report, _ = read_update(work)
    assert {name for name in report.scalars if name.startswith("class/")} == (
        {f"class/{digit}" for digit in range(10)} if told else set()
    )


def test_a_users_own_model_and_data_are_trained(tmp_path: Path) -> None:
    """Left (2) where the first pixel is bright, right (0) where the second is; nobody has seen `up`.

    32 of 40 samples train, 8 are kept for tests. The weights of a zero model move so that each pixel speaks for its
    class; repeated, all bits are the same, although the data draws from the generators of torch and numpy.
    """
    works = [make_task_work(tmp_path / name) for name in ("w", "again")]
    assert [fork_worker(work) for work in works] == [0, 0], (works[0] / "stderr").read_text()
    report, tensors = read_update(works[0])
    assert (report.num_samples, report.num_held, report.num_test, report.steps) == (32, 32, 8, 40)
    weight = tensors["model/head.weight"]
    assert (weight[:, 0].argmax().item(), weight[:, 1].argmax().item()) == (2, 0)
    assert report.evaluation is not None
    assert tensors["evaluation/confusion"].sum(dim=1)[1].item() == 0
    assert all(torch.equal(tensors[name], value) for name, value in read_update(works[1])[1].items())


def test_data_that_fails_in_the_middle_of_training_is_declined(tmp_path: Path) -> None:
    """Its labels are known from `targets`, so the broken sample is first read by the training."""
    text = TASK.replace("x = torch.full", "x = [].pop() if index == 7 else torch.full").replace(
        "    def __len__", "    targets = [0, 1] * 20\n    def __len__"
    )
    work = make_task_work(tmp_path / "w", text, data={"test_fraction": 0.0})
    assert fork_worker(work) == 76
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
    assert fork_worker(work) == 0, (work / "stderr").read_text()
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
    kept = read_state(work / "state")
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
    assert fork_worker(work) == 76
    reason = read_error(work)
    assert (reason["code"], "'block5' takes [4, 4, 4]" in reason["detail"]) == ("bad_method", True)
