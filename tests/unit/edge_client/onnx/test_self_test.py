"""The self-test of a deployed model: the real process, without torch, on files that are right, wrong and cut short."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from rows import digest
from torch import nn

from edge_client.errors import InputError
from edge_client.onnx import self_test
from edge_client.onnx import test_samples as onnx_probe
from edge_client.onnx.export import quantize, write_onnx
from edge_client.onnx.file import Facts, OnnxModel, add_properties, classes_hash
from edge_client.records import to_map
from edge_client.wire.messages import Deploy

FACTS = Facts(run="r-1", version=3, classes=("no", "yes", "maybe"), input=(1, 2, 2))
DEPLOY = Deploy(
    deployment="d1",
    run="r-1",
    version=3,
    input=(1, 2, 2),
    classes_sha256=classes_hash(("no", "yes", "maybe")),
    sha256=digest("x"),
    length=1,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linear model with known numbers: the weights 0 to 11 in tenths, no bias."""
    layer = nn.Linear(4, 3, bias=False)
    layer.weight.data = torch.arange(12.0).reshape(3, 4) / 10
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    write_onnx(nn.Sequential(nn.Flatten(), layer), FACTS, path)
    return path


def outcome(folder: Path, file: Path, *, budget: int = 10**9, deploy: Deploy = DEPLOY, **env: str) -> tuple[int, Any]:
    """The exit code and the result of the process that a daemon starts."""
    job, result = folder / "job.json", folder / "result.json"
    job.write_text(json.dumps({"file": str(file), "deploy": to_map(deploy), "budget_bytes": budget}))
    command = [sys.executable, "-m", "edge_client.onnx.self_test", str(job), str(result)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, check=False, timeout=60)
    return done.returncode, json.loads(result.read_text())


def test_a_right_file_passes_without_torch(tmp_path: Path, file: Path) -> None:
    """An interpreter in which torch cannot be imported at all."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
    code, told = outcome(tmp_path, file, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{os.getcwd()}")
    assert code == 0, told
    assert told["difference"] < 1e-6
    assert 20 * 10**6 < told["peak_bytes"] < 200 * 10**6


def test_a_budget_that_is_too_small_is_told(tmp_path: Path, file: Path) -> None:
    """30 MB do not hold onnxruntime."""
    code, told = outcome(tmp_path, file, budget=30 * 10**6)
    assert (code, told) == (75, {"error": "a process that uses it needs more than this device's budget of 30.0 MB"})


def test_a_model_that_does_not_fit_is_told_and_not_loaded(tmp_path: Path) -> None:
    """7 million weights, 28 MB, are read and copied; in 70 MB, of which onnxruntime alone takes about 60."""
    big = nn.Sequential(nn.Flatten(), nn.Linear(4, 1_000_000, bias=False), nn.Linear(1_000_000, 3))
    write_onnx(big, FACTS, tmp_path / "m.onnx")
    code, told = outcome(tmp_path, tmp_path / "m.onnx", budget=70 * 10**6)
    assert (code, told) == (75, {"error": "a process that uses it needs more than this device's budget of 70.0 MB"})


def test_a_device_that_computes_otherwise_is_told(tmp_path: Path, file: Path) -> None:
    """The largest output is below 1.1 x 4 and the others differ: half of all is more than a thousandth away."""
    code, told = outcome(tmp_path, file, FEDFIT_FAULT="halve:deployed.probe")
    assert code == 3
    assert "does not say to known samples what it said when it was made" in told["error"]


def test_a_device_without_onnxruntime_says_what_to_type(tmp_path: Path, file: Path) -> None:
    """A code of its own: it is no fault of the model's."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['onnxruntime'] = None\n")
    code, told = outcome(tmp_path, file, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{os.getcwd()}")
    assert code == 69
    assert "pip install 'fedfit[infer]'" in told["error"]


def test_a_result_that_finds_no_space_has_a_code_of_its_own(tmp_path: Path) -> None:
    """Neither passed nor failed nor crashed; half a result is not left."""
    job, result = tmp_path / "job.json", tmp_path / "result.json"
    job.write_text(json.dumps({"file": "/nothing.onnx", "deploy": to_map(DEPLOY), "budget_bytes": 10**9}))
    result.symlink_to("/dev/full")
    command = [sys.executable, "-m", "edge_client.onnx.self_test", str(job), str(result)]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (74, f"cannot write {result}: No space left on device\n")
    assert not result.is_symlink()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"run": "r-2"}, "run"),
        ({"version": 4}, "version"),
        ({"architecture": "width:1/2"}, "architecture"),
        ({"precision": "int8"}, "precision"),
        ({"input": (2, 2)}, "input"),
        ({"classes_sha256": classes_hash(("yes", "no", "maybe"))}, "classes"),
    ],
)
def test_a_file_that_is_not_what_was_announced_is_refused(file: Path, change: dict[str, Any], named: str) -> None:
    """Each fact alone; the same classes in another order are others."""
    model = OnnxModel(file)
    self_test._compare(model.facts, model.input_shape, DEPLOY)
    with pytest.raises(InputError, match=f"another {named} than was announced"):
        self_test._compare(model.facts, model.input_shape, dataclasses.replace(DEPLOY, **change))


def test_the_known_samples_are_the_same_everywhere() -> None:
    """k x 2654435761 mod 2^32, without its last 8 bits, as a part of 2^24: by Python's own numbers."""
    found = onnx_probe.samples((2, 3))
    assert (found.shape, found.dtype) == ((4, 2, 3), np.float32)
    by_hand = [((k * 2654435761 % 2**32) >> 8) / 2**24 for k in range(1, 25)]
    assert found.ravel().tolist() == by_hand
    assert 0 <= min(by_hand) < 0.1
    assert 0.9 < max(by_hand) < 1


def test_a_file_says_what_it_has_to_say(file: Path) -> None:
    """Of four samples and three classes: the product with the weights 0 to 1.1, by hand."""
    model = OnnxModel(file)
    x = onnx_probe.samples((1, 2, 2)).reshape(4, 4)
    expected = x @ (np.arange(12, dtype=np.float32).reshape(3, 4) / 10).T
    found = np.array(json.loads(model.properties["fedfit.probe"]))
    assert np.allclose(found, expected, atol=1e-6)
    difference = onnx_probe.difference(model)
    assert difference is not None
    assert difference < 1e-6


def test_a_small_file_has_an_expectation_of_its_own(file: Path, tmp_path: Path) -> None:
    """Bytes are not floats: what int8 says is compared with what int8 said."""
    quantize(file, FACTS, tmp_path / "small.onnx")
    model = OnnxModel(tmp_path / "small.onnx")
    assert onnx_probe.difference(model) == 0
    assert model.properties["fedfit.probe"] != OnnxModel(file).properties["fedfit.probe"]


@pytest.mark.parametrize("text", ["[[1, 2, 3]]", "x", "[]", "[" * 5000, json.dumps([[0.0, 0.0, float("nan")]] * 4)])
def test_an_expectation_that_makes_no_sense_is_told(file: Path, tmp_path: Path, text: str) -> None:
    """A file of somebody else's making; the last property of a name counts."""
    path = tmp_path / "m.onnx"
    path.write_bytes(file.read_bytes())
    add_properties(path, {"fedfit.probe": text})
    with pytest.raises(InputError, match="its metadata is damaged"):
        onnx_probe.difference(OnnxModel(path))


def test_a_file_without_an_expectation_is_only_loaded(file: Path, tmp_path: Path) -> None:
    """One of an earlier version, or of somebody else's making."""
    model = onnx.load(str(file))
    del model.metadata_props[:]
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert onnx_probe.difference(OnnxModel(tmp_path / "m.onnx")) is None
