"""Runs whose devices train on an accelerator: real workers, the model is that of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from accelerated import environment, needs_test_accelerator
from recorded_runs import FLAGS, flags_of
from simulations import shared_processes, simulated

pytestmark = needs_test_accelerator()

QUICK = ("fedepth",)  # groups of blocks in files


def _check(methods: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(FEDTEST_LEDGER=str(folder / "ledger")).items():
        monkeypatch.setenv(name, value)
    with shared_processes() as processes:
        for method in methods:
            models = {}
            for accelerator in ("none", "fedtest:0"):
                place = folder / f"{method}-{accelerator.partition(':')[0]}"
                result = simulated(place, processes, **flags_of(method), accelerator=accelerator)
                models[accelerator] = result["model_sha256"]
            assert models["fedtest:0"] == models["none"], method


def test_simulated_devices_train_on_the_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds, bit for bit."""
    _check(QUICK, tmp_path, monkeypatch)


@pytest.mark.slow
def test_all_other_methods_train_on_the_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-two methods."""
    _check([method for method in FLAGS if method not in QUICK], tmp_path, monkeypatch)
