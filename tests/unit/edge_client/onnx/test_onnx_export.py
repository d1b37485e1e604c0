"""ONNX files say what torch says, or are not written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import InputError
from edge_client.models import registry
from edge_client.models.slicing import parse
from edge_client.onnx.export import quantize, write_onnx
from edge_client.onnx.file import Facts, OnnxModel

CLASSES = ("ok", "scratch", "dent", "1,5", "Ä")
FAMILIES: list[tuple[str, tuple[int, ...], dict[str, Any], str]] = [
    ("mlp", (1, 6, 6), {}, "full"),
    ("small-cnn", (1, 8, 8), {"width": 4}, "width:1/2"),
    ("har-cnn", (3, 16), {"width": 4}, "full"),
    ("har-transformer", (3, 16), {"width": 16, "heads": 2, "depth": 2}, "layers:1"),
    ("preresnet20", (3, 8, 8), {"width": 4}, "full"),  # BatchNorms without statistics
    ("preresnet20", (3, 8, 8), {"width": 4, "track-running-stats": True, "shortcut": "pad"}, "full"),
    ("resnet14", (3, 16, 16), {"base-width": 4}, "depth:1.1.1.1-width:1/2"),
    ("resnet50", (3, 16, 16), {"base-width": 4, "small-stem": True}, "full"),
    ("densenet121", (3, 32, 32), {"growth": 4, "base-width": 8}, "full"),
    ("har-cnn", (3, 16), {"width": 4, "track-running-stats": False}, "full"),
    ("resnet14", (3, 16, 16), {"base-width": 4, "small-stem": True, "track-running-stats": False}, "width:1/2"),
    ("densenet121", (3, 40, 40), {"growth": 4, "base-width": 8, "track-running-stats": False}, "full"),
    ("vit-t-16", (3, 16, 16), {"patch": 8, "width": 12, "heads": 3, "depth": 2}, "width:1/2"),
]


def trained(name: str, shape: tuple[int, ...], options: dict[str, Any], cut: str) -> nn.Module:
    """With statistics that are not those of a new model: mean 0 and variance 1 would hide their loss."""
    torch.manual_seed(3)
    model = registry.build(name, input_shape=shape, num_classes=5, options=options, spec=parse(cut))
    for key, value in model.state_dict().items():
        if key.endswith("running_mean"):
            value.normal_(0, 0.1)
        elif key.endswith("running_var"):
            value.uniform_(0.8, 1.2)
    return model


def facts(shape: tuple[int, ...]) -> Facts:
    return Facts(run="defects-1", version=7, weights_sha256="ab" * 32, classes=CLASSES, input=shape)


@pytest.mark.parametrize(("name", "shape", "options", "cut"), FAMILIES, ids=lambda value: str(value)[:24])
def test_every_family_and_slice_says_what_torch_says(
    tmp_path: Path, name: str, shape: tuple[int, ...], options: dict[str, Any], cut: str
) -> None:
    """On samples and a size of a batch that the export never saw, through a session of onnxruntime's own."""
    model = trained(name, shape, options, cut)
    x = torch.rand(5, *shape, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        expected = model.eval()(x).numpy()
    written = write_onnx(model, facts(shape), tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (said,) = session.run(None, {"input": x.numpy()})
    assert np.abs(said - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())  # DenseNets begin with hundreds
    assert written.relative_difference <= 1e-4
    assert written.facts.batch_statistics == (not options.get("track-running-stats", name != "preresnet20"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.onnx"]


def test_a_file_says_where_it_comes_from(tmp_path: Path) -> None:
    """As onnx's own reader finds it, texts as they are and lists as JSON; and as ours does."""
    path = tmp_path / "m.onnx"
    write_onnx(trained("mlp", (1, 6, 6), {}, "full"), facts((1, 6, 6)), path)
    found = {entry.key: entry.value for entry in onnx.load(str(path)).metadata_props}
    assert found["fedfit.run"] == "defects-1"
    assert found["fedfit.version"] == "7"
    assert found["fedfit.classes"] == '["ok", "scratch", "dent", "1,5", "Ä"]'
    assert found["fedfit.input"] == "[1, 6, 6]"
    assert found["fedfit.weights_sha256"] == "ab" * 32
    assert "divided by 255" in found["fedfit.normalisation"]
    assert OnnxModel(path).facts == facts((1, 6, 6))


class _Counts(nn.Module):
    """Multiplies by the size of the batch as a plain number: a trace takes it for a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :5] * len(x)


class _Unknown(nn.Module):
    """Uses something that ONNX has no word for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x.reshape(-1, 6, 6)).real


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (_Counts(), "would not say the same as torch"),
        (_Unknown(), "cannot be written as ONNX"),
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 5)), "would not say the same as torch"),
    ],
    ids=["another-batch", "no-such-operator", "not-a-number"],
)
def test_a_model_that_would_not_be_the_same_is_refused(tmp_path: Path, model: nn.Module, said: str) -> None:
    """With a line that says why; a file that was there stays as it was."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"before")
    for parameter in model.parameters():
        nn.init.constant_(parameter, math.nan)
    with pytest.raises(InputError, match=said):
        write_onnx(model, facts((1, 6, 6)), path)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("m.onnx", b"before")]


def test_large_outputs_are_compared_by_their_size(tmp_path: Path) -> None:
    """Outputs about a million have float32's last digit at 0.06: above 1e-4, and all the same right."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 5))
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 300)
    written = write_onnx(model, facts((1, 6, 6)), tmp_path / "m.onnx")
    assert written.largest_output > 1e5
    assert written.relative_difference == written.max_difference / written.largest_output <= 1e-5


def test_int8_is_smaller_and_says_so(tmp_path: Path) -> None:
    """A matrix of 36 x 4,000 and one of 4,000 x 5 floats, 656 kB, become bytes: less than a third with all else."""
    plain, small = tmp_path / "m.onnx", tmp_path / "q.onnx"
    model = trained("mlp", (1, 6, 6), {"hidden": [4000]}, "full")
    written = write_onnx(model, facts((1, 6, 6)), plain)
    quantize(plain, written.facts, small)
    assert small.stat().st_size < plain.stat().st_size / 3
    models = [OnnxModel(path) for path in (plain, small)]
    assert [model.facts.precision for model in models] == ["fp32", "int8"]
    assert models[1].facts.classes == CLASSES
    x = np.random.default_rng(5).random((8, 1, 6, 6), dtype=np.float32)
    difference = np.abs(models[0].run(x) - models[1].run(x)).max()
    assert 0 < difference < 0.02 * np.abs(models[0].run(x)).max() + 0.02
