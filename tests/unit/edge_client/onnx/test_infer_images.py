"""`edge-client infer --model m.onnx cat.png`: the class of one image, with a probability that follows by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from edge_client.cli import main as cli
from edge_client.models.contract import from_sequential
from edge_client.onnx.export import write_onnx
from edge_client.onnx.file import Facts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its logits are the means of red, green and blue, times 4."""
    layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with torch.no_grad():
        layers[0].weight.copy_(4 * torch.eye(3).reshape(3, 3, 1, 1))
        layers[0].bias.zero_()
    out = tmp_path_factory.mktemp("model") / "m.onnx"
    facts = Facts(classes=("red", "green", "blue"), input=(3, 4, 4))
    write_onnx(from_sequential(layers, input_shape=(3, 4, 4)), facts, out)
    return out


def test_an_image_gets_its_class_and_probability(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pure green has logits 0, 4, 0: e^4 / (e^4 + 2) = 0.9647, the others 0.0177 each."""
    Image.new("RGB", (20, 10), (0, 255, 0)).save(tmp_path / "leaf.png")
    assert cli.main(["infer", "--model", str(model), str(tmp_path / "leaf.png")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'leaf.png'}: green 0.96 (red 0.02, blue 0.02)\n"
    assert cli.main(["infer", "--model", str(model), str(tmp_path / "leaf.png"), "--format", "json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["class"] == "green"
    assert answer["probability"] == pytest.approx(math.exp(4) / (math.exp(4) + 2), abs=1e-5)
    assert sum(answer["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}", "{folder}/none.png"], "none.png does not exist"),
        (["{model}", "{folder}/text.png"], "text.png is no image that can be decoded"),
        (["{model}"], "expected images, such as cat.png, or --data SOURCE:PATH, got neither"),
        (["{model}", "{folder}/text.png", "--data", "digits"], "got both"),
        (["small-cnn", "{folder}/text.png"], "single images need an exported model"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    model: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each names the file or the option."""
    (tmp_path / "text.png").write_text("no image")
    typed = [text.format(model=model, folder=tmp_path) for text in arguments]
    assert cli.main(["infer", "--model", *typed]) == 3
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
