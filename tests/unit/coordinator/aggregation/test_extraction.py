"""Slices out of the server's model and back into it, at their place or as models of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from aggregator_jobs import (
    SLICED,
    do_job,
    load,
    report_meta,
    save,
)
from torch import Tensor


def _cut(tmp_path: Path, run: dict[str, Any], cut: str) -> Path:
    out = tmp_path / cut.replace("/", "-")
    job = {"id": 1, "job": "encode", "run": run, "model": str(tmp_path / "m"), "slice": cut, "out": str(out)}
    reply = do_job(job)
    assert reply["ok"], reply
    return out


def _fold_slices(tmp_path: Path, run: dict[str, Any], values: Mapping[str, float]) -> dict[str, Tensor]:
    """Every device sends its slice full of one number; the folded model."""
    updates = []
    for cut, value in values.items():
        sent = load(_cut(tmp_path, run, cut))
        path = save(
            tmp_path / f"u-{value}", {n: torch.full_like(v, value) for n, v in sent.items()}, meta=report_meta("params")
        )
        updates.append({"device": f"d{value:g}", "path": str(path), "num_samples": 10, "slice": cut})
    out = tmp_path / "folded"
    job = {"job": "fold", "run": run, "round": 1, "model": str(tmp_path / "m"), "base": "", "updates": updates}
    reply = do_job({"id": 1, **job, "out": str(out)})
    assert reply["ok"], reply
    return load(out)


def test_a_slice_is_cut_and_put_back_at_its_place(tmp_path: Path) -> None:
    """4 hidden units, the slice has the first two: where both devices are, (1 + 3) / 2; elsewhere 1."""
    assert do_job({"id": 0, "job": "init", "run": SLICED, "out": str(tmp_path / "m")})["ok"]
    whole, half = load(tmp_path / "m"), load(_cut(tmp_path, SLICED, "width:1/2"))
    assert torch.equal(half["block1.linear.weight"], whole["block1.linear.weight"][:2])
    assert torch.equal(half["head.weight"], whole["head.weight"][:, :2])
    assert torch.equal(half["head.bias"], whole["head.bias"])
    folded = _fold_slices(tmp_path, SLICED, {"full": 1.0, "width:1/2": 3.0})
    assert folded["block1.linear.weight"].tolist() == [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]
    assert folded["head.weight"].tolist() == [[2.0, 2.0, 1.0, 1.0]] * 2
    assert folded["head.bias"].tolist() == [2.0, 2.0]


def test_what_no_slice_covers_keeps_its_bits(tmp_path: Path) -> None:
    """Only the half takes part."""
    do_job({"id": 0, "job": "init", "run": SLICED, "out": str(tmp_path / "m")})
    before = load(tmp_path / "m")["block1.linear.weight"]
    after = _fold_slices(tmp_path, SLICED, {"width:1/2": 3.0})["block1.linear.weight"]
    assert after[:2].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert torch.equal(after[2:], before[2:])


def test_architectures_may_share_nothing(tmp_path: Path) -> None:
    """Each slice is a model of its own, and begins as the part of the first model that it is."""
    run = SLICED | {"sharing": "architecture"}
    do_job({"id": 0, "job": "init", "run": run, "out": str(tmp_path / "m")})
    first = load(tmp_path / "m")
    own = "slice:width:1/2/model/block1.linear.weight"
    assert torch.equal(first[own], first["block1.linear.weight"][:2])
    folded = _fold_slices(tmp_path, run, {"full": 1.0, "width:1/2": 3.0})
    assert folded["block1.linear.weight"].tolist() == [[1.0, 1.0]] * 4
    assert folded[own].tolist() == [[3.0, 3.0]] * 2
    alone = _fold_slices(tmp_path, run, {"width:1/2": 5.0})
    assert torch.equal(alone["block1.linear.weight"], first["block1.linear.weight"])
    assert alone[own].tolist() == [[5.0, 5.0]] * 2
