"""Methods that exchange knowledge in the simulator: virtual devices of two architectures, the real codec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main as cli

Json = dict[str, Any]

FLAGS = ["--model", "mlp", "--set", "model.hidden=[128,64]", "--set", 'slices=["full","width:1/2"]', "--data", "digits"]
FLAGS += ["--devices", "2", "--rounds", "2", "--workers", "1", "--set", "train.batch=64", "--format", "json"]
CLASS_MEANS = ("felo", "fedhe", "fedproto", "fedin", "velo", "fedgkt")
SHARED = ("fedmd", "draftfed")


@pytest.mark.slow
@pytest.mark.parametrize("names", [CLASS_MEANS, SHARED], ids=["class means and pairs", "shared samples"])
def test_every_method_runs_and_those_without_weights_send_none(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rounds; the model has 17,226 parameters: sent without weights is less than it twice, in all."""
    more = ["--set", "public=digits", "--set", "public-samples=16"] if names is SHARED else []
    assert cli.main(["simulate", "--method", ",".join(names), *FLAGS, *more, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    results = {path.parent.name: json.loads(path.read_text()) for path in sorted(tmp_path.rglob("result.json"))}
    assert len(results) == len(names)
    for folder, result in results.items():
        name = next(name for name in names if name in folder)
        assert result["rounds"] == 2, folder
        sends_weights = name in ("felo", "velo", "fedin", "fedgkt")  # FedGKT: as much, but no weights
        assert (result["bytes_up"] > 2 * 4 * 17_226) == sends_weights, (folder, result["bytes_up"])
