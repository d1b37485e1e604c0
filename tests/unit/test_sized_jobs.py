"""The aggregator's jobs of methods that combine models of different sizes: what is cut, put back, and judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows import run_file
from torch import Tensor

from coordinator import aggregator
from edge_client.methods import registry
from edge_client.models import registry as models
from edge_client.models.contract import Model
from edge_client.models.slicing import parse
from edge_client.records import to_map
from edge_client.run_file import RunFile
from edge_client.wire.tensors import ContainerReader, codec_for, write_container

HIDDEN = [4, 4]
SIZES = {
    "inclusivefl": ("full", "depth:1.0"),
    "scalefl": ("full", "exit:1-width:1/2"),
    "splitmix": ("full", "width:1/2"),
}


def _run(method: str) -> RunFile:
    parameters = {"bases": 4} if method == "splitmix" else {}
    model = {"name": "mlp", "input": [3], "hidden": HIDDEN}
    made = {"name": method, **parameters}
    return run_file(model=model, classes=["a", "b"], method=made, slices=list(SIZES[method]))


def _answer(job: str, run: RunFile, folder: Path, **fields: Any) -> dict[str, Any]:
    reply = aggregator.answer({"id": 1, "job": job, "run": to_map(run), "model": str(folder / "m"), **fields})
    assert reply["ok"], reply
    return reply


def _init(run: RunFile, folder: Path) -> None:
    reply = aggregator.answer({"id": 1, "job": "init", "run": to_map(run), "out": str(folder / "m")})
    assert reply["ok"], reply


def _tensors(path: Path) -> dict[str, Tensor]:
    with ContainerReader(path) as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def _built(cut: str) -> Model:
    return models.build("mlp", input_shape=(3,), num_classes=2, options={"hidden": HIDDEN}, cut=parse(cut))


def _own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}


@pytest.mark.parametrize("method", SIZES)
def test_each_size_is_sent_taken_back_and_judged(method: str, tmp_path: Path) -> None:
    """A device gets what its network has. It sends everything + 1: what it has moves by 1, and nothing else does."""
    run = _run(method)
    _init(run, tmp_path)
    made, first = registry.of_run(run), _tensors(tmp_path / "m")
    cut = SIZES[method][1]
    _answer("encode", run, tmp_path, slice=cut, out=str(tmp_path / "sent"))
    sent = _tensors(tmp_path / "sent")
    model = _built(made.built(cut))
    model.load_state_dict(_own(sent))
    moved = {name: value + 1 for name, value in sent.items()}
    table = [(name, codec_for(value, "fp32"), value.shape) for name, value in moved.items()]
    write_container(tmp_path / "u", {"num_samples": 1, "payload": "params", "steps": 1}, table, moved.values())
    updates = [{"device": "a", "path": str(tmp_path / "u"), "num_samples": 1, "slice": cut}]
    _answer("fold", run, tmp_path, round=1, base=str(tmp_path / "m"), updates=updates, out=str(tmp_path / "next"))
    folded = _tensors(tmp_path / "next")
    grown = {name: float((folded[name] - value).sum()) for name, value in first.items()}
    sums = set(made.notes(_built("full")).get("own", ()))  # SplitMix: sums of what lies beside
    own = sum(total for name, total in grown.items() if name.removeprefix("model/") not in sums)
    assert own == pytest.approx(sum(value.numel() for value in sent.values()), rel=1e-4)


def _judged(run: RunFile, folder: Path, x: np.ndarray, y: np.ndarray) -> dict[str, tuple[int, float]]:
    np.savez(folder / "test.npz", x=x, y=y)
    reply = _answer("evaluate", run, folder, data=str(folder / "test.npz"))
    return {row["slice"]: (row["num_correct"], row["loss_sum"]) for row in reply["results"]}


def _cross_entropy(logits: Tensor, y: np.ndarray) -> float:
    labels = torch.from_numpy((y == "b").astype(np.int64))
    return float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))


@pytest.mark.parametrize("method", SIZES)
def test_each_size_is_judged_with_what_is_its_own(method: str, tmp_path: Path) -> None:
    """The same loss as that of the network that a device of the size builds; SplitMix: of the mean of its bases."""
    run = _run(method)
    _init(run, tmp_path)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(6, 3)).astype(np.float32), np.array(["a", "b", "b", "a", "b", "a"])
    judged = _judged(run, tmp_path, x, y)
    made = registry.of_run(run)
    for cut in SIZES[method]:
        _answer("encode", run, tmp_path, slice=cut, out=str(tmp_path / "sent"))
        sent = _tensors(tmp_path / "sent")
        others = sorted({name.split("/")[2] for name in sent if name.startswith("extra/base/")})
        bases = [_own(sent)]
        for number in others:
            start = f"extra/base/{number}/"
            bases.append({n.removeprefix(start): value for n, value in sent.items() if n.startswith(start)})
        with torch.no_grad():
            logits = []
            for weights in bases:
                model = _built(made.built(cut))
                model.load_state_dict(weights)
                logits.append(model.eval()(torch.from_numpy(x)))
        assert judged[cut][1] == pytest.approx(_cross_entropy(torch.stack(logits).mean(dim=0), y), rel=1e-5)
        wanted = {"full": 3, "width:1/2": 1} if method == "splitmix" else {}
        assert len(others) == wanted.get(cut, 0)


def test_as_one_network_the_model_of_splitmix_answers_as_all_bases(tmp_path: Path) -> None:
    """The largest logit of the sum is that of the mean."""
    run = _run("splitmix")
    _init(run, tmp_path)
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.choice(["a", "b"], size=40)
    whole = _built("full")
    whole.load_state_dict(_own(_tensors(tmp_path / "m")))
    with torch.no_grad():
        answers = whole.eval()(torch.from_numpy(x)).argmax(dim=1).numpy()
    assert _judged(run, tmp_path, x, y)["full"][0] == int((answers == (y == "b")).sum())
