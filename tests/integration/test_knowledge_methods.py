"""Methods that exchange knowledge, over real processes and MQTT: three devices of two architectures, one run each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_requests
from fleet import Fleet, hashes, mlp_run
from torch import Tensor

from coordinator import control
from coordinator.cli import tables
from coordinator.control_messages import ShowRun
from edge_client.wire.tensors import ContainerReader

pytestmark = pytest.mark.broker

DEVICES = ("a", "b", "c")
HALF = "width:1/2"
MODEL = {"hidden": [16, 8]}
SHARE = "{ min-count = 10, features = true, drafts = true }"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """a and b train the whole model, c the half of it; d's owner lets nothing out."""
    with Fleet(tmp_path_factory.mktemp("knowledge")) as fleet:
        fleet.start_coordinator()
        fleet.add_devices(*DEVICES, "d")
        for number, name in enumerate((*DEVICES, "d")):
            cut = HALF if name == "c" else "full"
            share = SHARE if name != "d" else "{ class-statistics = false }"
            group = "open" if name != "d" else "closed"
            fleet.start_device(
                name,
                data=f'{{ source = "digits", partition = "iid", part = [{number}, 4] }}',
                more=f'labels = {{ slice = "{cut}", group = "{group}" }}\nshare = {share}',
            )
        yield fleet


@pytest.fixture
def lonely(fleet: Fleet) -> Fleet:
    """With a device that has two classes of ten."""
    if "e" not in [row["id"] for row in raw_requests.request(fleet.state_dir, "device-list")["devices"]]:
        fleet.add_devices("e")
        data = '{ source = "digits", partition = "pathological:2", part = [0, 5] }'
        fleet.start_device("e", data=data, more=f'labels = {{ group = "lonely" }}\nshare = {SHARE}')
    return fleet


def finished(
    fleet: Fleet, method: str, parameters: Mapping[str, Any] | None = None, *, rounds: int = 2, codec: str = "fp32"
) -> dict[str, Any]:
    """A run of whole epochs on all devices that share."""
    run = mlp_run(
        rounds=rounds,
        devices=3,
        where=["group=open"],
        codec=codec,
        name=method,
        method={"name": method, **(parameters or {})},
        model=MODEL,
        slices=["full", HALF],
        sharing="architecture",
        train={"max-steps": 1000},
        evaluate={"every": 1 if method == "fedproto" else 0},
    )
    shown = fleet.wait_finished(fleet.start_run(run), 240)
    assert shown["state"] == "finished", shown["reason"]
    assert [device["id"] for device in shown["devices"]] == list(DEVICES)
    return shown


def blob(fleet: Fleet, sha256: str) -> Path:
    """A file of the coordinator."""
    return fleet.state_dir / "blobs" / sha256[:2] / sha256


def server(fleet: Fleet, shown: dict[str, Any], version: int) -> dict[str, Tensor]:
    """All tensors of a version, memory included."""
    with ContainerReader(blob(fleet, hashes(shown)[version])) as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def test_felo_remembers_class_means_of_both_widths(fleet: Fleet) -> None:
    """Features of 8 and of 4 numbers, logits of all three; two rounds leave the newest of each device and class."""
    shown = finished(fleet, "felo")
    memory = server(fleet, shown, 2)
    assert memory["memory/feature/8/values"].shape == (20, 8)  # a and b: ten classes each
    assert memory["memory/feature/4/values"].shape == (10, 4)
    assert memory["memory/logit/10/values"].shape == (30, 10)
    assert set(memory["memory/logit/10/rounds"].tolist()) == {2}
    assert not any(name.startswith("memory/") for name in server(fleet, shown, 0))


def unchanged(first: dict[str, Tensor], last: dict[str, Tensor]) -> bool:
    """Whether no device sent a weight: the server's model is the first one."""
    return all(value.equal(first[name]) for name, value in last.items() if not name.startswith("memory/"))


SENT = [("fedhe", "logit/10", (30, 10)), ("fedproto", "feature/8", (20, 8))]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "group", "shape"), SENT, ids=[name for name, _, _ in SENT])
def test_methods_without_weights_never_send_weights(
    fleet: Fleet, method: str, group: str, shape: tuple[int, int]
) -> None:
    """The server's model stays as it was; what it has learnt are class means."""
    shown = finished(fleet, method)
    first, last = server(fleet, shown, 0), server(fleet, shown, 2)
    assert unchanged(first, last)
    assert last[f"memory/{group}/values"].shape == shape
    assert sum(f"memory/{group}" in name for name in last) == 5


@pytest.mark.slow
def test_fedin_passes_feature_pairs_on_by_signature(fleet: Fleet) -> None:
    """16 pairs of each device and round: 2 x 2 x 16 of 16>8 numbers, 2 x 16 of 8>4."""
    shown = finished(fleet, "fedin")
    memory = server(fleet, shown, 2)
    assert memory["memory/pairs/16>8/in"].shape == (64, 16)
    assert memory["memory/pairs/16>8/out"].shape == (64, 8)
    assert memory["memory/pairs/8>4/in"].shape == (32, 8)


@pytest.mark.slow
def test_fedmd_agrees_on_shared_samples(fleet: Fleet) -> None:
    """The server reads 40 digits once, devices fetch them once; the consensus has a row of ten logits for each."""
    shown = finished(fleet, "fedmd", {"public": "digits", "public-samples": 40})
    first, last = server(fleet, shown, 0), server(fleet, shown, 2)
    assert first["memory/public"].shape == (40, 1, 8, 8)
    assert last["memory/values"].shape == (40, 10)
    assert unchanged(first, last)


@pytest.mark.slow
def test_draftfed_makes_targets_for_both_architectures(fleet: Fleet) -> None:
    """Drafts of 16 and 8 numbers, of 8 and 4; windows of 16 of 40: round 2 has samples 16 to 31. fp16 travels."""
    parameters = {"public": "digits", "public-samples": 40, "draft-batch": 16}
    shown = finished(fleet, "draftfed", parameters, codec="fp16")
    first, last = server(fleet, shown, 0), server(fleet, shown, 2)
    assert last["memory/targets/full/ids"].tolist() == list(range(16, 32))
    assert last["memory/targets/full/conv_1"].shape == (16, 16)
    assert last[f"memory/targets/{HALF}/conv_1"].shape == (16, 8)
    assert last[f"memory/targets/{HALF}/conv_2"].shape == (16, 4)
    assert unchanged(first, last)


@pytest.mark.slow
def test_velo_trains_its_network_beside_the_round(fleet: Fleet) -> None:
    """What it makes of round 1 is there after round 2: a feature of each width for ten classes."""
    shown = finished(fleet, "velo", {"vae-epochs": 2})
    once, twice = server(fleet, shown, 1), server(fleet, shown, 2)
    assert not any(name.startswith("memory/made/") for name in once)
    assert twice["memory/made/8/values"].shape == (10, 8)
    assert twice["memory/made/4/values"].shape == (10, 4)


@pytest.mark.slow
def test_fedgkt_trains_a_model_of_the_server_for_each_shape(fleet: Fleet) -> None:
    """Maps of 16 numbers of a and b, of 8 of c; 60 samples at 112 bytes fit into 6,800. Answers for all three."""
    shown = finished(fleet, "fedgkt", {"max-bytes": 6_800})
    first, last = server(fleet, shown, 0), server(fleet, shown, 2)
    assert unchanged(first, last)
    assert {name.split("/")[2] for name in last if name.startswith("memory/net/")} == {"16", "8"}
    answers = [value for name, value in last.items() if name.startswith("memory/answers/") and "values" in name]
    assert sorted(tuple(value.shape) for value in answers) == [(60, 10), (60, 10), (85, 10)]


def test_what_knowledge_a_run_lacks_is_shown_also_after_a_restart(lonely: Fleet, tmp_path: Path) -> None:
    """A device with two classes of ten; shared samples that are none; no test data: runs end well and tell of it."""
    fleet = lonely
    np.savez(tmp_path / "none.npz", x=np.zeros((0, 8, 8), dtype=np.float32), y=np.zeros(0, dtype=np.int64))
    common: dict[str, Any] = {
        "rounds": 1,
        "devices": 1,
        "where": ["group=lonely"],
        "model": MODEL,
        "evaluate": {"every": 0},
    }
    few = mlp_run(name="few", method={"name": "felo"}, train={"max-steps": 1000}, **common)
    none = mlp_run(name="none", method={"name": "fedmd", "public": f"npz:{tmp_path / 'none.npz'}"}, **common)
    blind = {**common, "evaluate": {"every": 1, "on": f"npz:{tmp_path / 'none.npz'}"}}
    unjudged = mlp_run(name="blind", method={"name": "fedavg"}, **blind)
    for file in (few, none, unjudged):
        shown = fleet.wait_finished(fleet.start_run(file), 120)
        assert shown["state"] == "finished", shown["reason"]
    fleet.stop("coordinator")
    fleet.start_coordinator()
    (missing,) = fleet.show("few-1")["left_out"]
    assert (missing["device"], missing["round"], missing["code"]) == ("e", 1, "missing_class")
    assert missing["detail"].startswith("tells nothing of 8 of 10 classes")
    (empty,) = fleet.show("none-1")["left_out"]
    assert (empty["device"], empty["code"]) == (None, "no_public")
    (untested,) = fleet.show("blind-1")["left_out"]
    assert (untested["device"], untested["round"], untested["code"]) == (None, 1, "no_test_data")
    assert fleet.show("blind-1")["evaluations"] == []
    assert missing["detail"] in tables.run(control.ask(fleet.state_dir, ShowRun(run="few-1")))
    assert untested["detail"] in tables.run(control.ask(fleet.state_dir, ShowRun(run="blind-1")))
    log = fleet.log("coordinator")
    assert log.count(f"no_test_data: {untested['detail']}") == 1
    assert f"e: missing_class: {missing['detail']}" in log
    assert f"all devices: no_public: {empty['detail']}" in log


def test_an_owner_who_shares_nothing_is_asked_and_says_no(fleet: Fleet) -> None:
    """d declines with its reason before it trains; the others go on."""
    run = mlp_run(rounds=1, devices=1, where=["group=closed"], name="closed", method={"name": "felo"}, model=MODEL)
    run_id = fleet.start_run(run)
    fleet.wait_until(lambda: "not_shared" in fleet.log("coordinator"), 60, "d declines")
    assert "keeps class means (share.class-statistics = false in device.toml)" in fleet.log("coordinator")
    fleet.ask("run-stop", run=run_id, now=True)
