"""`edge-client export`: the model that a device uses, from what its client keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import digest
from torch import Tensor
from typed import typed

from edge_client.client import identity
from edge_client.client.identity import Bundle
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.models import registry
from edge_client.onnx.file import OnnxModel
from edge_client.records import WorkOrder, to_map
from edge_client.wire.tensors import codec_for, write_container
from edge_client.worker import state_folder
from edge_client.worker.method_state import write_state

BUNDLE = Bundle(federation="fed", device="pi", brokers=("mqtts://h:8883",), password="p" * 20, key=digest("k"))
MODEL = {"name": "preresnet20", "input": [1, 8, 8], "width": 4, "track-running-stats": True}
OWN = "knowledge-1"  # the run


def build(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    own = {key: value for key, value in MODEL.items() if key not in ("name", "input")}
    return registry.build("preresnet20", input_shape=(1, 8, 8), num_classes=3, options=own)


def blob(state_dir: Path, data: bytes) -> Path:
    sha256 = hashlib.sha256(data).hexdigest()
    path = state_dir / "blobs" / sha256[:2] / sha256
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def container(path: Path, tensors: dict[str, Tensor], kept: Sequence[str]) -> bytes:
    table = [(name, codec_for(value, "fp32"), tuple(value.shape)) for name, value in tensors.items()]
    write_container(path, {"kept": [*kept]}, table, tensors.values())
    return path.read_bytes()


def device(folder: Path, method: dict[str, Any], kept: dict[str, Tensor]) -> tuple[Path, Path]:
    """A state directory after round 3 of a run, of which version 2 is `build(1)`; returns it and the model's blob."""
    state_dir = folder / "state"
    identity.join(state_dir, BUNDLE)
    run = {"name": "knowledge", "method": method, "model": MODEL, "classes": ["ok", "scratch", "dent"]}
    settings = {**to_map(parse_table(RunFile, run, source="test")), "x-rows": {}}
    tensors = {f"model/{name}": value for name, value in build(1).state_dict().items()}
    model = blob(state_dir, container(folder / "model.bin", tensors, kept))
    states = state_dir / "method-state" / OWN
    order = WorkOrder(
        lease="l1",
        run=OWN,
        round=3,
        num_rounds=9,
        train=True,
        evaluate=True,
        seed=5,
        learning_rate=0.1,
        budget_bytes=1,
        device="pi",
        parts={},
        device_file={},
        method_state=str(states),
    )
    state_folder.write_last_model(order, blob(state_dir, json.dumps(settings).encode()), model)
    if kept:
        write_state(states, kept)
        (states / "next").rename(states / "current")
    return state_dir, model


def said_by(path: Path, x: Tensor) -> Tensor:
    return torch.from_numpy(OnnxModel(path).run(x.numpy()))


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ({"name": "local"}, ""),
        ({"name": "fedper", "personal": 1}, "head."),
        ({"name": "draftfed", "public": "npz:/nowhere.npz"}, ""),
        ({"name": "fedproto"}, ""),
        ({"name": "fedavg"}, "nothing"),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_what_is_personal_takes_its_place_in_the_received_model(
    tmp_path: Path, method: dict[str, Any], own: str
) -> None:
    """LastModel: seed 1. Kept: seed 2, all of it or the head. The file says what torch says with the two together."""
    kept = {name: value for name, value in build(2).state_dict().items() if name.startswith(own)}
    state_dir, model = device(tmp_path, method, {f"model/{name}": value for name, value in kept.items()})
    out = tmp_path / "mine.onnx"
    words = ["--onnx", out, "--state-dir", state_dir, "--format", "json"]
    done = typed("edge_client", "export", "latest", *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["run"], told["version"], told["device"]) == (OWN, 2, "pi")
    assert (told["personal"], told["weights_sha256"]) == (own != "nothing", model.name)
    expected = build(1)
    expected.load_state_dict({**expected.state_dict(), **kept})
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        assert torch.allclose(said_by(out, x), expected.eval()(x), atol=1e-4)
    assert OnnxModel(out).facts.classes == ("ok", "scratch", "dent")


@pytest.mark.parametrize(
    ("name", "change", "code", "said"),
    [
        ("defects", "", 7, f"unknown run on this device 'defects'; known: {OWN}"),
        ("know", "no state", 3, "no round of it has counted"),
        ("know", "no blob", 4, "is not on this device now"),
        ("know", "damaged", 4, "is damaged"),
        ("know", "no note", 7, "known: none yet"),
        ("know", "suffix", 3, "--onnx: expected a file that ends with .onnx"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(tmp_path: Path, name: str, change: str, code: int, said: str) -> None:
    """With the exit code of its kind; nothing is written, and the client's files stay as they are."""
    kept = {} if change == "no state" else {f"model/{key}": value for key, value in build(2).state_dict().items()}
    state_dir, model = device(tmp_path, {"name": "local"}, kept)
    if change == "no blob":
        model.unlink()
    elif change == "damaged":
        model.write_bytes(b"x")
    elif change == "no note":
        (state_dir / "method-state" / OWN / "received.json").write_text("{")
    before = {path: path.read_bytes() for path in state_dir.rglob("*") if path.is_file()}
    out = tmp_path / ("mine.txt" if change == "suffix" else "mine.onnx")
    done = typed("edge_client", "export", name, "--onnx", out, "--state-dir", state_dir)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert said in done.stderr
    assert not out.exists()
    assert {path: path.read_bytes() for path in state_dir.rglob("*") if path.is_file()} == before
