"""Every weight-sharing method over real processes and MQTT: one fleet of three devices, one run after another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from fleet import Fleet, hashes, mlp_run
from torch import Tensor, nn
from typed import ok, typed

from edge_client.config.device_file import load_device_file
from edge_client.config.run_file import ModelSection
from edge_client.data.sources import open_data
from edge_client.models import registry as models
from edge_client.models.anchors import anchors
from edge_client.models.slicing import parse
from edge_client.wire.tensors import ContainerReader
from edge_client.worker.method_state import read_state
from edge_client.worker.stored_tensors import StoredTensors

pytestmark = pytest.mark.broker

DEVICES = ("a", "b", "c")
CLASSES = [str(digit) for digit in range(10)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Device c has a quarter of the samples of the others."""
    with Fleet(tmp_path_factory.mktemp("methods")) as fleet:
        fleet.start_coordinator()
        fleet.add_devices(*DEVICES)
        for name, part in zip(DEVICES, ("[0, 4]", "[1, 4]", "[15, 16]"), strict=True):
            fleet.start_device(name, data=f'{{ source = "digits", partition = "iid", part = {part} }}')
        yield fleet


@pytest.fixture(scope="module")
def plain(fleet: Fleet) -> dict[str, Any]:
    """Two rounds of FedAvg, with which all that follows is compared."""
    return finished(fleet, "fedavg")


def start(fleet: Fleet, method: str, rounds: int = 2, **changes: Any) -> str:
    """Whole epochs: 23 steps on a and b, 6 on c."""
    names: dict[str, Any] = {"name": method, "method": {"name": method}, "train": {"max-steps": 1000}}
    return fleet.start_run(mlp_run(rounds=rounds, devices=3, **names, **changes))


def finished(fleet: Fleet, method: str, rounds: int = 2, **changes: Any) -> dict[str, Any]:
    shown = fleet.wait_finished(start(fleet, method, rounds, **changes), 240)
    assert shown["state"] == "finished", shown["reason"]
    assert [device["id"] for device in shown["devices"]] == list(DEVICES)
    return shown


def server_tensors(fleet: Fleet, shown: dict[str, Any], version: int) -> dict[str, Tensor]:
    sha256 = hashes(shown)[version]
    with ContainerReader(fleet.state_dir / "blobs" / sha256[:2] / sha256) as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def states(fleet: Fleet, run: str) -> dict[str, dict[str, Tensor]]:
    """What the method keeps on each device."""
    folders = {name: fleet.folder / name / "state/method-state" / run for name in DEVICES}
    return {name: dict(read_state(folder)) for name, folder in folders.items()}


def test_scaffold_keeps_its_control_variates_through_a_kill(fleet: Fleet, plain: dict[str, Any]) -> None:
    """b is killed (-9) after round 1 and starts again: after round 2, c is still the mean of all c_i.

    Had b forgotten its c_i, c would differ from that mean by a third of it. Round 1 is FedAvg's: all c are zero.
    """
    run = start(fleet, "scaffold")
    fleet.wait_until(lambda: fleet.show(run)["round"] >= 1 and bool(states(fleet, run)["b"]), 120, "round 1 is over")
    fleet.kill("b")
    assert all(value.abs().sum() > 0 for value in states(fleet, run)["b"].values())
    shown = fleet.wait_finished(run, 240)
    assert shown["state"] == "finished", shown["reason"]
    assert fleet.num_restarts["b"] == 1
    first, average = server_tensors(fleet, shown, 1), server_tensors(fleet, plain, 1)
    assert all(torch.equal(first[name], value) for name, value in average.items())
    last, kept = server_tensors(fleet, shown, 2), states(fleet, run)
    average = server_tensors(fleet, plain, 2)
    assert not all(torch.equal(last[name], value) for name, value in average.items())
    for name, control in last.items():
        if name.startswith("extra/control/"):
            own = [state[name.removeprefix("extra/control/")] for state in kept.values()]
            torch.testing.assert_close(control, torch.stack(own).mean(dim=0), rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_moon_compares_with_the_previous_model_from_round_2_on(fleet: Fleet, plain: dict[str, Any]) -> None:
    """Round 1 has FedAvg's bytes, round 2 has not."""
    shown = finished(fleet, "moon")
    assert hashes(shown)[:2] == hashes(plain)[:2]
    assert hashes(shown)[2] != hashes(plain)[2]
    assert all({*state} == {*server_names(fleet, shown)} for state in states(fleet, shown["run"]).values())


def server_names(fleet: Fleet, shown: dict[str, Any]) -> list[str]:
    return [name.removeprefix("model/") for name in server_tensors(fleet, shown, 0)]


@pytest.mark.slow
def test_fednova_normalises_by_the_steps_that_devices_made(fleet: Fleet, plain: dict[str, Any]) -> None:
    """From FedAvg's first model to other weights than FedAvg's, in about its direction."""
    shown = finished(fleet, "fednova", 1)
    assert hashes(shown)[0] == hashes(plain)[0]
    first, nova, average = (server_tensors(fleet, *which) for which in ((shown, 0), (shown, 1), (plain, 1)))
    for name, value in first.items():
        moved, usual = (nova[name] - value).flatten(), (average[name] - value).flatten()
        assert not torch.equal(moved, usual)
        assert float(torch.dot(moved, usual)) > 0


@pytest.mark.slow
def test_inco_changes_the_later_layers_of_each_stage_on_the_server(fleet: Fleet) -> None:
    """One round from one first model, with the rule and without: the targets of the model's anchors differ, only."""
    options = {"width": 2}
    model = ModelSection(name="preresnet20", input=(1, 8, 8), options=options)
    tensors = []
    for rule in ("released", "off"):
        run = mlp_run(rounds=1, devices=3, name="inco", method={"name": "inco+fednova", "rule": rule})
        shown = fleet.wait_finished(fleet.start_run(replace(run, model=model)), 240)
        assert shown["state"] == "finished", shown["reason"]
        tensors.append([server_tensors(fleet, shown, version) for version in (0, 1)])
    (first, changed), (same_first, plain) = tensors
    assert all(torch.equal(value, same_first[name]) for name, value in first.items())
    built = models.build("preresnet20", input_shape=(1, 8, 8), num_classes=10, options=options)
    differing = {name.removeprefix("model/") for name in plain if not torch.equal(changed[name], plain[name])}
    assert differing == {*anchors(built)}


def test_fedper_trains_heads_that_never_leave_and_judges_with_them(fleet: Fleet, plain: dict[str, Any]) -> None:
    """The server's head stays as it was made; version 2 is judged with the shared base and each device's own head."""
    shown = finished(fleet, "fedper", evaluate={"every": 2})
    first, last = server_tensors(fleet, shown, 0), server_tensors(fleet, shown, 2)
    assert [name for name, value in first.items() if torch.equal(value, last[name])] == [
        "model/head.weight",
        "model/head.bias",
    ]
    kept, correct = states(fleet, shown["run"]), {}
    for name, state in kept.items():
        assert state.keys() == {"model/head.weight", "model/head.bias"}
        correct[name] = accuracy(fleet.folder / name / "device.toml", {**last, **state})
    judged = {e["device"]: e["accuracy"] for e in shown["device_evaluations"] if e["version"] == 2}
    assert judged == pytest.approx(correct)
    assert not torch.equal(kept["a"]["model/head.weight"], kept["b"]["model/head.weight"])
    check_export(fleet, "a", shown["run"], {**last, **kept["a"]})
    refused = typed("coordinator", "run", "export", shown["run"], "--onnx", "x.onnx", "--state-dir", fleet.state_dir)
    assert (refused.returncode, "live on the devices" in refused.stderr) == (3, True)


def check_export(fleet: Fleet, device: str, run: str, tensors: dict[str, Tensor]) -> None:
    """`edge-client export` beside the running client: its file says what these weights say."""
    out, state_dir = fleet.folder / f"{run}.onnx", fleet.folder / device / "state"
    told = json.loads(ok("edge_client", "export", run, "--onnx", out, "--state-dir", state_dir, "--format", "json"))
    assert (told["run"], told["version"], told["device"], told["personal"]) == (run, 2, device, True)
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    (said,) = onnxruntime.InferenceSession(str(out)).run(None, {"input": x.numpy()})
    assert torch.allclose(torch.from_numpy(said), mlp_of(tensors)(x), atol=1e-5)
    unknown = typed("edge_client", "export", "nobody-1", "--onnx", out, "--state-dir", state_dir)
    assert (unknown.returncode, run in unknown.stderr) == (7, True)


def accuracy(device_toml: Path, tensors: dict[str, Tensor], cut: str = "") -> float:
    """Of the fleet's mlp, or a slice of a deep one, with these weights on a device's test samples."""
    section = load_device_file(device_toml).data
    assert section is not None
    _, test = open_data(section, CLASSES, (1, 8, 8))
    x, y = test.batch(range(len(test)))
    return float((mlp_of(tensors, cut)(x).argmax(dim=1) == y).float().mean())


def mlp_of(tensors: dict[str, Tensor], cut: str = "") -> nn.Module:
    """The fleet's mlp with these weights, or a slice of one of three hidden layers."""
    hidden = [16, 16, 16] if cut else [16]
    model = models.build(
        "mlp", input_shape=(1, 8, 8), num_classes=10, options={"hidden": hidden}, spec=parse(cut or "full")
    )
    model.load_state_dict({name.removeprefix("model/"): value for name, value in tensors.items()})
    return model.eval().requires_grad_(False)


def test_local_moves_no_model_but_the_first(fleet: Fleet, plain: dict[str, Any]) -> None:
    """All versions are one blob; a device gets it once, where FedAvg's gets two, and sends no weights at all."""
    shown = finished(fleet, "local")
    assert len({*hashes(shown)}) == 1
    length = shown["models"][0]["bytes"]
    moved, usual = ({device["id"]: device for device in run["devices"]} for run in (shown, plain))
    for name in DEVICES:
        assert usual[name]["bytes_down"] - moved[name]["bytes_down"] > 0.9 * length
        assert usual[name]["bytes_up"] - moved[name]["bytes_up"] > 1.5 * length
    weights = [state["model/head.weight"] for state in states(fleet, shown["run"]).values()]
    assert not torch.equal(weights[0], weights[1])


def test_a_run_that_shares_nothing_fails_before_any_device_is_asked(fleet: Fleet) -> None:
    """personal = 2 of the mlp's two layers; the reason says what would work."""
    run = fleet.start_run(mlp_run(rounds=1, name="none", method={"name": "fedper", "personal": 2}))
    shown = fleet.wait_finished(run, 60)
    assert shown["state"] == "failed"
    assert "set personal to 0 to 1" in shown["reason"]
    assert shown["leases"] == []


SIZES = {"a": "full", "b": "width:1/2", "c": "width:1/4"}


@pytest.fixture
def of_three_sizes(fleet: Fleet) -> Iterator[Fleet]:
    """The devices' labels say how much of the model each of them trains."""
    for name, cut in SIZES.items():
        assert fleet.ask("device-label", name=name, put={"slice": cut}) is not None
    yield fleet
    for name in SIZES:
        fleet.ask("device-label", name=name, put={}, drop=["slice"])


WIDE = ("fedavg", "fedprox", "fedrolex", "scaffold", "moon", "fednova")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in WIDE]


@pytest.mark.parametrize("method", ["heterofl", *SLOW])
def test_devices_of_three_sizes_train_one_model(of_three_sizes: Fleet, method: str) -> None:
    """Two rounds: each device gets and sends its share of the 16 hidden units, and the server's model has them all.

    The first 4 units are everybody's, the next 4 also b's, the last 8 a's alone: some of each move (a unit that is 0
    for all samples never does). Each sends fewer bytes than the one before, and is judged with its own share.
    """
    fleet = of_three_sizes
    shown = finished(fleet, method, slices=list(SIZES.values()), evaluate={"every": 1})
    devices = {device["id"]: device for device in shown["devices"]}
    assert {name: device["plan_details"]["slice"] for name, device in devices.items()} == SIZES
    first, last = server_tensors(fleet, shown, 0), server_tensors(fleet, shown, 2)
    weight = first["model/block1.linear.weight"]
    assert weight.shape == (16, 64)
    moved = (last["model/block1.linear.weight"] != weight).any(dim=1)
    assert all(part.any() for part in torch.split(moved, [4, 4, 8]))
    assert devices["a"]["bytes_up"] > devices["b"]["bytes_up"] > devices["c"]["bytes_up"]
    judged = {(e["device"], e["slice"]) for e in shown["device_evaluations"] if e["version"] == 2}
    assert judged == {*SIZES.items()}


DEEP = {
    "inclusivefl": ("full", "depth:1.1.0", "depth:1.0.0"),
    "scalefl": ("full", "exit:2-width:1/2", "exit:1-width:1/2"),
    "splitmix": ("full", "width:1/2", "width:1/4"),  # eight bases, four, two
}
OWN = {"inclusivefl": {*DEEP["inclusivefl"][1:]}, "scalefl": {"exit/1", "exit/2"}}
OWN["splitmix"] = {f"base{number}" for number in range(8)}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["splitmix", "inclusivefl", "scalefl"])
def test_devices_of_three_sizes_have_something_of_their_own(fleet: Fleet, method: str) -> None:
    """Two rounds: each trains its own size, and what belongs to one size alone moves, too."""
    sizes = dict(zip(DEVICES, DEEP[method], strict=True))
    for name, cut in sizes.items():
        fleet.ask("device-label", name=name, put={"slice": cut})
    model = {"hidden": [16, 16, 16]}
    shown = finished(fleet, method, model=model, slices=list(sizes.values()))
    for name in sizes:
        fleet.ask("device-label", name=name, put={}, drop=["slice"])
    devices = {device["id"]: device for device in shown["devices"]}
    assert {name: device["plan_details"]["slice"] for name, device in devices.items()} == sizes
    assert devices["a"]["bytes_up"] > devices["b"]["bytes_up"] > devices["c"]["bytes_up"]
    first, last = server_tensors(fleet, shown, 0), server_tensors(fleet, shown, 2)
    assert [name for name, value in first.items() if torch.equal(value, last[name])] == []
    own = {"/".join(name.split("/")[1:-1]) for name in first if name.startswith("extra/")}
    assert own == OWN[method]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedper", "local"])
def test_devices_of_three_depths_keep_their_own_layers_through_a_kill(fleet: Fleet, method: str) -> None:
    """Three, two and one hidden layer: FedPer shares block1, Local nothing; all else is each device's own.

    b is killed (-9) after round 1: had it forgotten its layers, its training would have begun with the first ones, and
    its last ones would be those of one round. The server's stay as they were made.
    """
    sizes = dict(zip(DEVICES, DEEP["inclusivefl"], strict=True))
    for name, cut in sizes.items():
        fleet.ask("device-label", name=name, put={"slice": cut})
    run = start(fleet, method, model={"hidden": [16, 16, 16]}, slices=list(sizes.values()), evaluate={"every": 2})
    fleet.wait_until(lambda: fleet.show(run)["round"] >= 1 and bool(own(fleet, run, "b")), 240, "round 1 is over")
    before, kills = own(fleet, run, "b"), fleet.num_restarts.get("b", 0)
    fleet.kill("b")
    shown = fleet.wait_finished(run, 240)
    for name in sizes:
        fleet.ask("device-label", name=name, put={}, drop=["slice"])
    assert shown["state"] == "finished", shown["reason"]
    assert fleet.num_restarts["b"] == kills + 1
    first, last = server_tensors(fleet, shown, 0), server_tensors(fleet, shown, 2)
    moved = {name.split(".")[0] for name, value in first.items() if not torch.equal(value, last[name])}
    assert moved == ({"model/block1"} if method == "fedper" else set())
    layers = {"a": {"block2", "block3", "head"}, "b": {"block2", "head"}, "c": {"head"}}
    for name, cut in sizes.items():
        kept = own(fleet, run, name)
        wanted = layers[name] | ({"block1"} if method == "local" else set())
        assert {key.removeprefix("model/").split(".")[0] for key in kept} == wanted
        judged = {e["device"]: e for e in shown["device_evaluations"] if e["version"] == 2}[name]
        assert judged["slice"] == cut
        tensors = {key: value for key, value in last.items() if key.split(".")[0] == "model/block1"} | kept
        assert judged["accuracy"] == pytest.approx(accuracy(fleet.folder / name / "device.toml", tensors, cut))
    after = own(fleet, run, "b")
    began = {key: first[key] for key in before}
    assert all(_far(after[key], began[key]) > _far(before[key], began[key]) for key in before if key.endswith("weight"))


def own(fleet: Fleet, run: str, device: str) -> dict[str, Tensor]:
    """The layers that a device keeps, whatever its slice."""
    folder = fleet.folder / device / "state/method-state" / run
    paths = sorted(folder.glob("stored-*")) or sorted(folder.glob("current"))
    return dict(StoredTensors(paths[-1])) if paths else {}


def _far(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm())


@pytest.mark.slow
def test_inco_over_devices_of_three_depths(fleet: Fleet) -> None:
    """Two rounds of a small PreResNet with 3, 2 and 1 blocks per stage: everything that somebody trains moves."""
    sizes = dict(zip(DEVICES, ("full", "depth:2.2.2", "depth:1.1.1"), strict=True))
    for name, cut in sizes.items():
        fleet.ask("device-label", name=name, put={"slice": cut})
    model = ModelSection(name="preresnet20", input=(1, 8, 8), options={"width": 2})
    run = mlp_run(rounds=2, devices=3, name="inco", method={"name": "inco+fedprox"}, slices=list(sizes.values()))
    shown = fleet.wait_finished(fleet.start_run(replace(run, model=model)), 240)
    for name in sizes:
        fleet.ask("device-label", name=name, put={}, drop=["slice"])
    assert shown["state"] == "finished", shown["reason"]
    devices = {device["id"]: device for device in shown["devices"]}
    assert {name: device["plan_details"]["slice"] for name, device in devices.items()} == sizes
    first, last = server_tensors(fleet, shown, 0), server_tensors(fleet, shown, 2)
    assert [name for name, value in first.items() if torch.equal(value, last[name])] == []
