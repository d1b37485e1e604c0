"""Methods that exchange knowledge, over real processes and MQTT: three devices of two architectures, one run each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, hashes, mlp_run
from torch import Tensor

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


def finished(fleet: Fleet, method: str, *, rounds: int = 2, codec: str = "fp32", **parameters: Any) -> dict[str, Any]:
    """A run of whole epochs on all devices that share."""
    run = mlp_run(
        rounds=rounds,
        devices=3,
        where=["group=open"],
        codec=codec,
        name=method,
        method={"name": method, **parameters},
        model=MODEL,
        slices=["full", HALF],
        sharing="architecture",
        train={"max-steps": 1000},
        evaluate={"every": 1},
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
