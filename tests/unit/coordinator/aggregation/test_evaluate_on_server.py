"""The server's own evaluation: counts and loss by hand, every slice, test data that does not fit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from aggregator_jobs import (
    RUN,
    SLICED,
    deep_run,
    do_job,
    evaluate,
    init,
    load,
    save,
    task_run,
)


def test_a_model_is_judged_on_the_servers_own_test_data(tmp_path: Path) -> None:
    """Weights [[0, 0, 0, 1], [1, 0, 0, 0]]: the answer is b where the first pixel is brighter than the last.

    Logits (0, 1), (1, 0), (1, 0) for truths b, a, b: 2 of 3, loss 2 log(1 + 1/e) + log(1 + e).
    """
    fields = task_run(tmp_path)
    save(tmp_path / "m", {"head.weight": torch.tensor([[0.0, 0, 0, 1], [1, 0, 0, 0]]), "head.bias": torch.zeros(2)})
    x = np.array([[[1, 0], [0, 0]], [[0, 0], [0, 1]], [[0, 0], [0, 1]]], dtype=np.float32)
    (reply,) = evaluate(tmp_path, fields, x=x, y=np.array(["b", "a", "b"]))["results"]
    loss = 2 * math.log(1 + math.exp(-1)) + math.log(1 + math.e)
    assert reply["loss_sum"] == pytest.approx(loss, rel=1e-6)
    assert {key: reply[key] for key in ("num_samples", "num_correct", "confusion")} == {
        "num_samples": 3,
        "num_correct": 2,
        "confusion": [1, 0, 1, 1],
    }


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((1, 2), np.float32), "y": np.array(["c"])}, "class 'c' not in the run"),
        ({"x": np.zeros((1, 3), np.float32), "y": np.array([0])}, "the model's input is [2], the samples are [3]"),
        ({"x": np.zeros((1, 2), np.float32)}, "expected an array 'y'"),
    ],
)
def test_test_data_that_does_not_fit_the_run_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    """As on a device; here the file is the server's."""
    assert init(tmp_path, "m", {"run": RUN})["ok"]
    reply = evaluate(tmp_path, {"run": RUN}, **arrays)
    assert (reply["ok"], reply["code"]) == (False, "input")
    assert message in reply["detail"]


def test_test_data_without_samples_judges_nothing(tmp_path: Path) -> None:
    """The run goes on; a comparison of models has nothing to look at, and says so."""
    fields = task_run(tmp_path)
    save(tmp_path / "m", {"head.weight": torch.zeros(2, 4), "head.bias": torch.zeros(2)})
    none = {"x": np.zeros((0, 2, 2), np.float32), "y": np.zeros(0, np.int64)}
    (reply,) = evaluate(tmp_path, fields, **none)["results"]
    assert (reply["num_samples"], reply["num_correct"], reply["loss_sum"], reply["confusion"]) == (0, 0, 0.0, [0] * 4)
    probe = {"id": 1, "job": "probe", "round": 1, "model": str(tmp_path / "m"), "base": str(tmp_path / "m")}
    compared = do_job({**probe, "updates": [], "data": str(tmp_path / "test.npz"), **fields})
    assert (compared["ok"], compared["code"]) == (False, "input")
    assert "expected at least one test sample, got none" in compared["detail"]


def test_an_evaluation_does_not_see_a_methods_tensors(tmp_path: Path) -> None:
    """The same result with and without auxiliary heads in the file."""
    x = np.random.default_rng(1).random((4, 1, 8, 8), np.float32)
    results = []
    for name, method in (("deep", "fedepth"), ("heads", "m-fedepth")):
        (tmp_path / name).mkdir()
        run = {"run": deep_run(method)}
        assert init(tmp_path / name, "m", run)["ok"]
        results.append(evaluate(tmp_path / name, run, x=x, y=np.array([0, 1, 0, 1])))
    assert results[0]["ok"], results[0]
    assert results[0] == results[1]


def test_every_slice_is_judged(tmp_path: Path) -> None:
    """All weights 0 and a bias for b: both are right about the two of three samples that are b's."""
    do_job({"id": 0, "job": "init", "run": SLICED, "out": str(tmp_path / "m")})
    zeros = {name: torch.zeros_like(value) for name, value in load(tmp_path / "m").items()}
    save(tmp_path / "m", zeros | {"head.bias": torch.tensor([0.0, 1.0])})
    x, y = np.zeros((3, 2), dtype=np.float32), np.array(["b", "a", "b"])
    results = evaluate(tmp_path, {"run": SLICED}, x=x, y=y)["results"]
    assert [(r["slice"], r["num_correct"], r["num_samples"]) for r in results] == [("full", 2, 3), ("width:1/2", 2, 3)]
