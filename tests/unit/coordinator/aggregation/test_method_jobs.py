"""The aggregator's jobs where a method has something of its own: tensors, what stays on devices, what it refuses."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from aggregator_jobs import do_job
from rows import run_file
from torch import Tensor

from coordinator.run_check import check_run
from edge_client.errors import InputError
from edge_client.records import to_map
from edge_client.wire.tensors import ContainerReader, codec_for, write_container

TASK = """
from torch import nn
from edge_client import Task
mine = Task(model=lambda n: nn.Sequential(nn.Flatten(), nn.Linear(4, n)), train_data=lambda device: None)
"""


def _run(method: str, **more: Any) -> dict[str, Any]:
    """An mlp of 4 inputs, 3 hidden and 2 classes."""
    model = {"name": "mlp", "input": [1, 2, 2], "hidden": [3]}
    return to_map(run_file(**{"model": model, "method": {"name": method, **more.pop("parameters", {})}, **more}))


def _answer(job: str, out: Path, **fields: Any) -> dict[str, Any]:
    return do_job({"id": 1, "job": job, "out": str(out), **fields})


def _tensors(path: Path) -> dict[str, Tensor]:
    with ContainerReader(path) as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def _write(path: Path, values: dict[str, Tensor], **report: Any) -> Path:
    table = [(name, codec_for(value, "fp32"), value.shape) for name, value in values.items()]
    write_container(path, {"num_samples": 10, "payload": "params", **report}, table, values.values())
    return path


def test_control_variates_begin_at_zero_and_are_not_inherited(tmp_path: Path) -> None:
    """The c_i of another run are not on the devices any more, so its c would pull the model for ever."""
    assert _answer("init", tmp_path / "first", run=_run("scaffold"))["ok"]
    first = _tensors(tmp_path / "first")
    controls = [name for name in first if name.startswith("extra/control/")]
    assert [name.removeprefix("extra/control/") for name in controls] == [
        name.removeprefix("model/") for name in first if name.startswith("model/")
    ]
    with ContainerReader(tmp_path / "first") as reader:
        assert reader.header.meta == {"kept": ("extra/devices",)}
    trained = {name: value + 1 for name, value in first.items()}
    start = _write(tmp_path / "start", trained)
    assert _answer("init", tmp_path / "next", run=_run("scaffold"), start=str(start))["ok"]
    for name, value in _tensors(tmp_path / "next").items():
        assert torch.equal(value, trained[name] if name.startswith("model/") else torch.zeros_like(value))


def test_a_fold_of_scaffold_counts_the_devices_of_the_run(tmp_path: Path) -> None:
    """One of N = 4 devices answers with 1 in place of c = 0: c = 1/4; the model is the device's."""
    run = _run("scaffold")
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    first = _tensors(tmp_path / "m").items()
    sent = {name: torch.ones_like(value) for name, value in first if value.is_floating_point()}
    update = _write(tmp_path / "u", sent, steps=1, scalars={"first": 1.0})
    job = {"run": run, "round": 1, "model": str(tmp_path / "m"), "base": str(tmp_path / "m"), "num_devices": 4}
    updates = [{"device": "a", "path": str(update), "num_samples": 10}]
    assert _answer("fold", tmp_path / "next", **job, updates=updates)["ok"]
    folded = _tensors(tmp_path / "next")
    assert folded.pop("extra/devices").tolist() == [4, 1]
    for name, value in folded.items():
        assert torch.equal(value, torch.full_like(value, 0.25 if name.startswith("extra/") else 1.0))


def test_where_each_architecture_has_its_own_model_scaffold_counts_its_devices(tmp_path: Path) -> None:
    """One of four devices answers, for one of two architectures: c of that is all of what it sent, not a fourth."""
    run = _run("scaffold", slices=["full", "width:1/2"], sharing="architecture")
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    first = {name: value for name, value in _tensors(tmp_path / "m").items() if not name.startswith("slice:")}
    sent = {name: torch.ones_like(value) for name, value in first.items() if value.is_floating_point()}
    update = _write(tmp_path / "u", sent, steps=1, scalars={"first": 1.0})
    job = {"run": run, "round": 1, "model": str(tmp_path / "m"), "base": str(tmp_path / "m"), "num_devices": 4}
    updates = [{"device": "a", "path": str(update), "num_samples": 10}]
    assert _answer("fold", tmp_path / "next", **job, updates=updates)["ok"]
    for name, value in _tensors(tmp_path / "next").items():
        assert torch.equal(value, torch.ones_like(value)) or name.startswith("slice:"), name


def test_a_fold_of_inco_knows_the_anchors_from_the_models_own_file(tmp_path: Path) -> None:
    """har-cnn has one pair of equal layers: the target is not the update's, all else is.

    Every weight moves by .01: <g_0, g_k> = <g_0, g_0>, 5 elements: theta = .0005/(.0005 + 1e-7); .01 (1 + theta).
    """
    run = _run("inco", model={"name": "har-cnn", "input": [9, 32]})
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    first = _tensors(tmp_path / "m")
    with ContainerReader(tmp_path / "m") as reader:
        (noted,) = reader.header.meta["notes"]["anchors"]
    names = [f"model/{name}" for name in noted]
    assert names == ["model/stage1_block1.conv.weight", "model/stage1_block2.conv.weight"]
    update = _write(tmp_path / "u", {name: value + 0.01 for name, value in first.items() if value.is_floating_point()})
    job = {"run": run, "model": str(tmp_path / "m"), "base": str(tmp_path / "m"), "num_devices": 1}
    updates = [{"device": "a", "path": str(update), "num_samples": 10}]
    for number, model in ((1, "m"), (2, "next")):  # the notes go with the model from round to round
        job["model"] = str(tmp_path / model)
        assert _answer("fold", tmp_path / ("next", "last")[number - 1], **job, round=number, updates=updates)["ok"]
    folded, sent = _tensors(tmp_path / "next"), _tensors(update)
    assert [name for name in sent if not torch.equal(folded[name], sent[name])] == names[1:]
    moved = folded[names[1]] - first[names[1]]
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01 * (1 + 0.9998)), rtol=1e-4, atol=0)


def test_a_model_that_inco_cannot_change_fails_before_the_run(tmp_path: Path) -> None:
    """An mlp has no two layers of one shape in a stage."""
    told = _answer("init", tmp_path / "m", run=_run("inco+fedprox"))
    assert (told["ok"], told["code"]) == (False, "input")
    assert "this model has none; use a deeper one" in told["detail"]


def test_a_fold_of_fednova_uses_steps_and_the_runs_momentum(tmp_path: Path) -> None:
    """From 0, devices at -1 after 1 and 2 steps with rho = .5: a = 1 and 2.5; -(1.75)(.5 + .5/2.5) = -1.225."""
    run = _run("fednova", train={"momentum": 0.5})
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    zeros = {name: torch.zeros_like(value) for name, value in _tensors(tmp_path / "m").items()}
    model = _write(tmp_path / "zeros", zeros)
    moved = {name: value - 1 for name, value in zeros.items()}
    updates = [
        {"device": name, "path": str(_write(tmp_path / name, moved, steps=steps)), "num_samples": 10}
        for name, steps in (("a", 1), ("b", 2))
    ]
    job = {"run": run, "round": 1, "model": str(model), "base": str(model), "updates": updates}
    assert _answer("fold", tmp_path / "next", **job)["ok"]
    for value in _tensors(tmp_path / "next").values():
        torch.testing.assert_close(value, torch.full_like(value, -1.225))
    adam = _run("fednova", train={"optimizer": "adam", "momentum": 0.5})
    assert _answer("fold", tmp_path / "adam", **{**job, "run": adam})["ok"]
    for value in _tensors(tmp_path / "adam").values():  # a = 1 and 2: -(1.5)(.5 + .25)
        torch.testing.assert_close(value, torch.full_like(value, -1.125))


def test_what_local_folds_has_the_bytes_of_what_it_was(tmp_path: Path) -> None:
    """Updates without tensors: the next version is the same blob, which devices do not fetch again."""
    run = _run("local")
    made = _answer("init", tmp_path / "m", run=run)
    update = _write(tmp_path / "u", {}, steps=1)
    job = {"run": run, "round": 1, "model": str(tmp_path / "m"), "base": str(tmp_path / "m")}
    updates = [{"device": "a", "path": str(update), "num_samples": 10}]
    assert _answer("fold", tmp_path / "next", **job, updates=updates)["sha256"] == made["sha256"]


def test_a_run_in_which_nothing_would_be_shared_ends_before_it_begins(tmp_path: Path) -> None:
    """The mlp has a hidden layer and a head: two units with parameters."""
    reply = _answer("init", tmp_path / "m", run=_run("fedper", parameters={"personal": 2}))
    assert (reply["ok"], reply["code"]) == (False, "input")
    assert "shares nothing, the model has 2 units with parameters; set personal to 0 to 1" in reply["detail"]
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("method", "code"), [("scaffold", None), ("moon", None), ("fedper", "input"), ("m-fedepth", "input")]
)
def test_a_task_whose_samples_the_server_does_not_know(tmp_path: Path, method: str, code: str | None) -> None:
    """Scaffold and MOON need no shapes there; FedPer sees that one layer alone cannot be shared; m-FeDepth asks."""
    (tmp_path / "mine.py").write_text(TASK)
    sha256 = hashlib.sha256(TASK.encode()).hexdigest()
    task = {"name": "mine", "file": "mine.py:mine", "sha256": sha256}
    run = to_map(run_file(model=None, task=task, method={"name": method}))
    reply = _answer("init", tmp_path / "m", run=run, task=str(tmp_path / "mine.py"))
    assert reply.get("code") == code, reply


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "local"])
def test_a_model_whose_shapes_only_devices_know_has_no_slices(tmp_path: Path, method: str) -> None:
    """What they would leave out is not known; the run ends before it begins."""
    (tmp_path / "mine.py").write_text(TASK)
    task = {"name": "mine", "file": "mine.py:mine", "sha256": hashlib.sha256(TASK.encode()).hexdigest()}
    run = to_map(run_file(model=None, task=task, method={"name": method}, slices=["full", "layers:1"]))
    reply = _answer("init", tmp_path / "m", run=run, task=str(tmp_path / "mine.py"))
    assert (reply["ok"], reply["code"]) == (False, "input")
    assert "cannot cut full, layers:1 out of a task's model without the shape of a sample; tell it" in reply["detail"]


@pytest.mark.parametrize("cut", ["exit:1", "exit:1-width:1/2"])
def test_exits_that_a_model_has_not_end_the_run_before_it_begins(tmp_path: Path, cut: str) -> None:
    """The head of small-cnn reads a flattened map; no device could build the slice."""
    run = _run("scalefl", model={"name": "small-cnn", "input": [1, 8, 8]}, slices=["full", cut])
    reply = _answer("init", tmp_path / "m", run=run)
    assert (reply["ok"], reply["code"]) == (False, "input")
    assert f"slice '{cut}': this model has no exits; use another (mlp, a resnet or a vit)" in reply["detail"]


@pytest.mark.parametrize("method", [{"name": "local"}, {"name": "fedper"}])
def test_the_server_cannot_judge_models_that_live_on_devices(method: dict[str, Any], tmp_path: Path) -> None:
    """With a file of test data on the server the run is refused; FedPer without personal layers is FedAvg."""
    evaluate = {"on": f"npz:{tmp_path}/test.npz"}
    with pytest.raises(InputError, match=r'live on the devices, the server cannot judge them; set it to "devices"'):
        check_run(run_file(method=method, evaluate=evaluate))
    check_run(run_file(method=method))
    check_run(run_file(method={"name": "fedper", "personal": 0}, evaluate=evaluate))
