"""One run of a ResNet, a DenseNet and a plain CNN, over real processes and MQTT: every device has another model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, hashes, mlp_run
from torch import Tensor
from typed import typed

from edge_client.config.run_file import ModelSection
from edge_client.onnx.file import OnnxModel
from edge_client.wire.tensors import ContainerReader

pytestmark = pytest.mark.broker

MODEL = ModelSection(name="resnet10", input=(1, 8, 8), options={"base_width": 4, "small_stem": True})
MODELS = {"dense": {"name": "densenet121", "growth": 2, "base-width": 4}}
# device -> what it is told to train, by its label
TRAINS = {"a": "resnet10", "b": "dense", "c": "small-cnn"}
SHARED = {"public": "digits", "public-samples": 40}
SHARE = "{ min-count = 10, features = true, drafts = true }"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three devices, each with a label that names a model."""
    with Fleet(tmp_path_factory.mktemp("families")) as fleet:
        fleet.start_coordinator()
        fleet.add_devices(*TRAINS)
        for name, model in TRAINS.items():
            fleet.start_device(name, more=f'labels = {{ slice = "{model}" }}\nshare = {SHARE}')
        yield fleet


def begin(fleet: Fleet, method: str, **parameters: Any) -> str:
    """A run of three rounds; its id."""
    file = mlp_run(
        rounds=3,
        devices=3,
        name=method,
        method={"name": method, **parameters},
        models=MODELS,
        slices=["full", "dense", "small-cnn"],
        train={"max-steps": 4},
        evaluate={"every": 1},
    )
    return fleet.start_run(replace(file, model=MODEL))


def finished(fleet: Fleet, run: str) -> dict[str, Any]:
    """What the coordinator shows in the end: every device trained its own model in every round."""
    shown = fleet.wait_finished(run, 240)
    assert shown["state"] == "finished", shown["reason"]
    trained = {device["id"]: device["plan"].partition(",")[0] for device in shown["devices"]}
    assert trained == {"a": "full", "b": "model:dense", "c": "model:small-cnn"}
    assert [sorted(result["per_architecture"]) for result in shown["evaluations"]][-1] == sorted(set(trained.values()))
    return shown


def server(fleet: Fleet, shown: dict[str, Any], version: int) -> dict[str, Tensor]:
    """All tensors of a version."""
    sha256 = hashes(shown)[version]
    with ContainerReader(fleet.state_dir / "blobs" / sha256[:2] / sha256) as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def changed(first: dict[str, Tensor], last: dict[str, Tensor]) -> set[str]:
    """Of which models weights came back."""
    return {
        name.rpartition("/model/")[0] or "full"
        for name, value in last.items()
        if not name.startswith("memory/") and not value.equal(first[name])
    }


def test_draftfed_makes_targets_for_every_family_and_outlives_its_coordinator(fleet: Fleet, tmp_path: Path) -> None:
    """The coordinator is killed in the run. Drafts of 16 of 40 samples; round 3 has numbers 32 to 39 and 0 to 7.

    First and last convolution on 1x8x8: ResNet10 of width 4 with a small stem 4x8x8 and 32x1x1 (convolution 9);
    DenseNet121 with stem 7x7 of stride 2 4x4x4, its last one (120) all channels behind the head's BatchNorm: 4 + 6*2 =
    16 halved 8, + 24 = 32 halved 16, + 48 = 64 halved 32, + 32 = 64; small-cnn 32x8x8 and 64x4x4 (convolution 2).
    """
    run = begin(fleet, "draftfed", **SHARED, **{"draft-batch": 16})
    fleet.wait_until(lambda: fleet.show(run)["round"] >= 2, 240, "the second round")
    fleet.kill("coordinator")
    fleet.start_coordinator()
    shown = finished(fleet, run)
    first, last = server(fleet, shown, 0), server(fleet, shown, 3)
    assert changed(first, last) == set()  # no weights came
    wanted = {"full": {1: (4, 8, 8), 9: (32, 1, 1)}, "model:dense": {1: (4, 4, 4), 120: (64, 1, 1)}}
    wanted |= {"model:small-cnn": {1: (32, 8, 8), 2: (64, 4, 4)}}
    for cut, convs in wanted.items():
        own = f"memory/targets/{cut}/"
        assert last[f"{own}ids"].tolist() == [*range(8), *range(32, 40)]
        assert last[f"{own}depths"].tolist() == [2, 9, 120]
        told = {name.removeprefix(own): value for name, value in last.items() if name.startswith(f"{own}conv_")}
        assert {name: tuple(value.shape) for name, value in told.items()} == {
            f"conv_{number}": (16, *shape) for number, shape in convs.items()
        }
    out = tmp_path / "b.onnx"
    words = ["--onnx", out, "--state-dir", fleet.folder / "b" / "state", "--format", "json"]
    done = typed("edge_client", "export", run, *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["model"], told["architecture"], told["personal"]) == ("densenet121", "model:dense", True)
    assert OnnxModel(out).facts.model == "densenet121"


ALONE = [("local", {}), ("fedhe", {}), ("fedproto", {}), ("fedmd", SHARED), ("fedgkt", {"max-bytes": 10**5})]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "parameters"), ALONE, ids=[name for name, _ in ALONE])
def test_methods_without_weights_send_none_of_any_family(fleet: Fleet, method: str, parameters: dict[str, Any]) -> None:
    """The server's three models stay as they were."""
    shown = finished(fleet, begin(fleet, method, **parameters))
    assert changed(server(fleet, shown, 0), server(fleet, shown, 3)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["felo", "velo", "fedin", "fedprox"])
def test_methods_with_weights_move_every_family_by_itself(fleet: Fleet, method: str) -> None:
    """Each of the three models is another after three rounds."""
    shown = finished(fleet, begin(fleet, method))
    moved = changed(server(fleet, shown, 0), server(fleet, shown, 3))
    assert moved == {"full", "slice:model:dense", "slice:model:small-cnn"}
