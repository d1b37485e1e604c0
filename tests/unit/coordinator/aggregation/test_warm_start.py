"""Runs that start from another run's model: what they take of it, and which models are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from aggregator_jobs import (
    RUN,
    deep_run,
    init,
    load,
    save,
)

from edge_client import durable


def test_a_run_may_start_from_another_runs_model(tmp_path: Path) -> None:
    """Its tensors, bit for bit, in the order of the new run's model."""
    assert init(tmp_path, "plain", {"run": RUN})["ok"]
    plain = load(tmp_path / "plain")
    values = {name: torch.arange(plain[name].numel()).reshape(plain[name].shape) / 7 for name in reversed(plain)}
    reply = init(tmp_path, "m", {"run": RUN}, save(tmp_path / "start", values))
    assert reply["ok"], reply
    started = load(tmp_path / "m")
    assert list(started) == list(plain)
    assert all(torch.equal(started[name], values[name]) for name in plain)
    assert reply["sha256"] == durable.sha256_file(tmp_path / "m") != durable.sha256_file(tmp_path / "start")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop(max(values)), "it has no"),
        (lambda values: values.update(extra=torch.zeros(1)), "it has 'extra', the run's model has not"),
        (lambda values: values.update({max(values): torch.zeros(9)}), "is [9], the run's model has"),
    ],
)
def test_a_start_that_is_another_model_is_refused_with_the_first_difference(
    tmp_path: Path, change: Any, message: str
) -> None:
    """A missing tensor, one too many, another shape; nothing is written."""
    assert init(tmp_path, "plain", {"run": RUN})["ok"]
    values = load(tmp_path / "plain")
    change(values)
    reply = init(tmp_path, "m", {"run": RUN}, save(tmp_path / "start", values))
    assert (reply["ok"], reply["code"]) == (False, "input")
    assert message in reply["detail"]
    assert not (tmp_path / "m").exists()


def test_a_start_without_a_methods_tensors_gets_fresh_ones(tmp_path: Path) -> None:
    """A FedAvg model as the start of m-FeDepth: its weights, new heads; one of m-FeDepth gives its heads, too."""
    assert init(tmp_path, "m", {"run": deep_run("m-fedepth")})["ok"]
    fresh = load(tmp_path / "m")
    ones = {name: torch.ones_like(value) for name, value in fresh.items()}
    plain = {name: value for name, value in ones.items() if not name.startswith("extra/")}
    for name, start, expected in (("a", ones, ones), ("b", plain, fresh | plain)):
        reply = init(tmp_path, name, {"run": deep_run("m-fedepth")}, save(tmp_path / f"start {name}", start))
        assert reply["ok"], reply
        came = load(tmp_path / name)
        assert list(came) == list(fresh)
        assert all(torch.equal(came[key], value) for key, value in expected.items())
    assert init(tmp_path, "c", {"run": deep_run("fedavg")}, tmp_path / "start a")["ok"]
    assert list(load(tmp_path / "c")) == list(plain)
