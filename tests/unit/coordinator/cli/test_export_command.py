"""`coordinator run export`: which model becomes a file; `tests/integration/test_runs.py` asks a running coordinator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aggregator_jobs import do_job
from typed import typed

from coordinator.aggregation import export_job
from coordinator.aggregation.jobs import ExportedModel, ExportJob
from edge_client import records
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.methods import registry as methods
from edge_client.models import registry as models
from edge_client.models.slicing import FULL, parse
from edge_client.onnx.file import OnnxModel
from edge_client.wire.tensors import codec_for, write_container

OPTIONS = {"hidden": [8]}
RUN = """
name = "digits"
{method}
model = {{ name = "mlp", input = [1, 8, 8], hidden = [8] }}
slices = ["full", "width:1/2"]
{sharing}
classes = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
evaluate = {{ on = "{on}" }}
"""


def finished(folder: Path, *, method: str = "", sharing: str = "", on: str = "devices") -> dict[str, torch.Tensor]:
    """A folder as a simulation leaves it after two rounds; returns the tensors of its model."""
    folder.mkdir()
    (folder / "run.toml").write_text(RUN.format(method=method, sharing=sharing, on=on))
    lines = [{"round": number, "bytes_up": 0, "bytes_down": 0} for number in (1, 2)]
    (folder / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"rounds": 2}))
    torch.manual_seed(4)
    full = build(FULL).state_dict()
    tensors = {f"model/{name}": value for name, value in full.items()}
    if sharing:
        torch.manual_seed(5)
        own = build(parse("width:1/2")).state_dict()
        tensors |= {f"slice:width:1/2/model/{name}": value for name, value in own.items()}
    table = [(name, codec_for(value, "fp32"), tuple(value.shape)) for name, value in tensors.items()]
    write_container(folder / "model.bin", {}, table, tensors.values())
    return tensors


def build(cut: Any) -> torch.nn.Module:
    return models.build("mlp", input_shape=(1, 8, 8), num_classes=10, options=OPTIONS, spec=cut)


def by_hand(tensors: dict[str, torch.Tensor], x: np.ndarray, beginning: str = "", hidden: int = 8) -> np.ndarray:
    """Two layers with a ReLU between, of the first `hidden` units."""
    up, up_bias, down, bias = (tensors[name].numpy() for name in tensors if name.startswith(f"{beginning}model/"))
    inner = np.maximum(x.reshape(len(x), -1) @ up[:hidden].T + up_bias[:hidden], 0)
    said: np.ndarray = inner @ down[:, :hidden].T + bias
    return said


@pytest.mark.parametrize("cut", ["full", "width:1/2"])
def test_a_simulations_model_and_its_slices(tmp_path: Path, cut: str) -> None:
    """What the file says is what the run's tensors say by hand; half the width is the first 4 of 8 units."""
    tensors = finished(tmp_path / "sim")
    out = tmp_path / "m.onnx"
    words = ["--architecture", cut, "--onnx", out, "--format", "json"]
    done = typed("coordinator", "run", "export", tmp_path / "sim", *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["run"], told["version"], told["architecture"], told["precision"]) == ("sim", 2, cut, "fp32")
    assert told["max_difference"] <= 1e-4
    x = np.random.default_rng(1).random((3, 1, 8, 8), dtype=np.float32)
    hidden = {"full": 8, "width:1/2": 4}[cut]
    model = OnnxModel(out)
    assert np.allclose(model.run(x), by_hand(tensors, x, hidden=hidden), atol=1e-5)
    assert model.facts.classes == tuple("abcdefghij")


def test_a_slice_that_is_a_model_of_its_own(tmp_path: Path) -> None:
    """With sharing = "architecture" the slice's own tensors, not the whole model's."""
    tensors = finished(tmp_path / "sim", sharing='sharing = "architecture"')
    out = tmp_path / "m.onnx"
    done = typed("coordinator", "run", "export", tmp_path / "sim", "--architecture", "width:0.5", "--onnx", out)
    assert done.returncode == 0, done.stderr
    assert "version 2, mlp (width:1/2), fp32" in done.stdout
    x = np.random.default_rng(1).random((3, 1, 8, 8), dtype=np.float32)
    own = by_hand(tensors, x, beginning="slice:width:1/2/", hidden=4)
    assert np.allclose(OnnxModel(out).run(x), own, atol=1e-5)
    assert not np.allclose(own, by_hand(tensors, x, hidden=4), atol=1e-3)


def test_int8_tells_the_accuracy_lost(tmp_path: Path) -> None:
    """On the run's own test data: 40 random images, whose labels are what the model says, so fp32 is right in all."""
    tensors = finished(tmp_path / "sim", on=f"npz:{tmp_path / 'test.npz'}")
    x = np.random.default_rng(2).random((40, 1, 8, 8), dtype=np.float32)
    np.savez(tmp_path / "test.npz", x=x, y=by_hand(tensors, x).argmax(1))
    out = tmp_path / "m.onnx"
    done = typed("coordinator", "run", "export", tmp_path / "sim", "--int8", "--onnx", out, "--format", "json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["int8"]
    assert (told["num_samples"], told["fp32_accuracy"]) == (40, 1.0)
    assert told["accuracy_lost"] == pytest.approx(1.0 - told["accuracy"])
    assert told["accuracy"] > 0.7
    assert OnnxModel(out).facts.precision == "int8"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["nowhere/at-all", "--onnx", "m.onnx"], 7, "nowhere/at-all is no folder"),
        (["sim", "--onnx", "m.bin"], 3, "--onnx: expected a file that ends with .onnx"),
        (["sim", "--onnx", "no/m.onnx"], 3, "--onnx: the folder"),
        (["sim", "--onnx", "m.onnx", "--version", "best"], 3, "keeps its last model alone, version 2"),
        (["sim", "--onnx", "m.onnx", "--architecture", "width:1/3"], 7, "it has: full, width:1/2"),
        (["sim", "--onnx", "m.onnx", "--architecture", "wide"], 7, "it has: full, width:1/2"),
        (["sim", "--onnx", "m.onnx", "--data", "digits"], 3, "--data: only with --int8"),
        (["sim", "--onnx", "m.onnx", "--input", "3y4"], 3, "--input: expected a shape such as 3x96x96"),
        (["personal", "--onnx", "m.onnx"], 3, "edge-client export personal --onnx m.onnx"),
        (["cut", "--onnx", "m.onnx"], 3, "cut/model.bin: not a fedfit container"),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else None,
)
def test_what_cannot_be_exported_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int, said: str
) -> None:
    """With the exit code of its kind; no file is left."""
    monkeypatch.chdir(tmp_path)
    finished(tmp_path / "sim")
    finished(tmp_path / "personal", method='method = { name = "local" }')
    finished(tmp_path / "cut")
    (tmp_path / "cut" / "model.bin").write_bytes(b"\0" * 500)
    done = typed("coordinator", "run", "export", *options)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert said in done.stderr
    assert not (tmp_path / "m.onnx").exists()


def test_every_method_says_whether_the_server_has_its_model() -> None:
    """Methods whose devices share parts or knowledge have none: `edge-client export` is for them."""
    without = {part for name in methods.names() if not methods.has_global_model(name, {}) for part in name.split("+")}
    assert {"draftfed", "fedmd", "fedper", "fedproto", "local"} <= without
    assert not {"fedavg", "fedepth", "heterofl", "splitmix", "scalefl"} & without


SIZED = {
    "heterofl": {"name": "preresnet20", "input": [1, 8, 8], "width": 16},
    "fedrolex": {"name": "small-cnn", "input": [1, 8, 8], "width": 16},
    "scalefl": {"name": "preresnet20", "input": [1, 8, 8], "width": 16, "track-running-stats": True},
    "splitmix": {"name": "small-cnn", "input": [1, 8, 8], "width": 16},
    "inclusivefl": {"name": "har-transformer", "input": [1, 64], "width": 16, "heads": 2},
    "m-fedepth": {"name": "small-cnn", "input": [1, 8, 8], "width": 8},
}


@pytest.mark.parametrize("method", SIZED)
def test_a_file_says_what_the_server_judges(tmp_path: Path, method: str) -> None:
    """The largest and the smallest slice, whatever a method makes of them: as many of 64 are right as there."""
    run = {"name": "r", "method": {"name": method}, "model": SIZED[method], "classes": [*"abcdefghij"]}
    file = records.to_map(parse_table(RunFile, run, source="test"))
    rng = np.random.default_rng(6)
    data = {"x": rng.random((64, *SIZED[method]["input"]), dtype=np.float32), "y": rng.integers(0, 10, 64)}
    np.savez(tmp_path / "t.npz", **data)
    model = str(tmp_path / "model.bin")
    assert do_job({"job": "init", "run": file, "out": model})["ok"]
    judged = do_job({"job": "evaluate", "run": file, "model": model, "data": str(tmp_path / "t.npz")})
    assert judged["ok"], judged
    results = judged["results"][:: max(1, len(judged["results"]) - 1)]
    for result in results:
        out = tmp_path / "m.onnx"
        job = ExportJob(
            run=records.from_map(RunFile, file),
            name="r-1",
            version=0,
            model=model,
            sha256="",
            architecture=result["slice"],
            out=str(out),
        )
        exported = export_job.do(job)
        assert isinstance(exported, ExportedModel), exported
        said = OnnxModel(out).run(data["x"])
        assert int((said.argmax(1) == data["y"]).sum()) == result["num_correct"]
