"""What a method makes of a version beside the next round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from aggregator_jobs import do_job
from rows import run_file
from torch import Tensor

from edge_client.knowledge.kinds import ClassTable, Knowledge, named_tensors
from edge_client.records import to_map
from edge_client.wire.tensors import ContainerReader, codec_for, write_container


def _run(method: str, **more: Any) -> dict[str, Any]:
    """An mlp of 4 inputs, 3 hidden and 2 classes."""
    model = {"name": "mlp", "input": [1, 2, 2], "hidden": [3]}
    return to_map(run_file(**{"model": model, "method": {"name": method, **more.pop("parameters", {})}, **more}))


def _answer(job: str, out: Path, **fields: Any) -> dict[str, Any]:
    return do_job({"id": 1, "job": job, "out": str(out), **fields})


def _tensors(path: Path) -> dict[str, Tensor]:
    with ContainerReader(path) as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def _table(label: str, value: float, count: int = 40) -> ClassTable:
    return ClassTable(
        label=label, counts=torch.tensor([count, 0]), values=torch.full((1, 2 if label == "logit" else 3), value)
    )


def _update(path: Path, model: Path, *items: Knowledge, weights: bool = True, **more: object) -> Path:
    """As a device sends it."""
    sent = {name: t for name, t in _tensors(model).items() if name.startswith("model/")} if weights else {}
    named = [*sent.items(), *named_tensors(items)]
    table = [(name, codec_for(value, "fp32"), value.shape) for name, value in named]
    meta = {"num_samples": 10, "payload": "params", "steps": 1, **more}
    write_container(path, meta, table, (value for _, value in named))
    return path


def _fold(tmp_path: Path, run: dict[str, Any], round_: int, model: Path, **updates: Path) -> Path:
    out = tmp_path / f"v{round_}"
    listed = [{"device": name, "path": str(path), "num_samples": 10} for name, path in updates.items()]
    fields = {"run": run, "round": round_, "model": str(model), "base": str(model), "updates": listed}
    reply = _answer("fold", out, **fields)
    assert reply["ok"], reply
    return out


def test_a_study_is_the_same_whether_it_was_begun_before_or_not(tmp_path: Path) -> None:
    """After a restart nobody began it: the fold makes it itself, bit for bit."""
    run = _run("velo", parameters={"vae-epochs": 2})
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    names = ("a", "b")
    said = {n: _update(tmp_path / n, tmp_path / "m", _table("feature", float(k))) for k, n in enumerate(names)}
    first = _fold(tmp_path, run, 1, tmp_path / "m", **said)
    results = []
    for begun in (True, False):
        if begun:
            assert do_job({"id": 1, "job": "study", "run": run, "model": str(first), "version": 1})["ok"]
        results.append(_tensors(_fold(tmp_path, run, 2, first, **said)))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert results[0]["memory/made/3/values"].shape == (1, 3)
