"""`coordinator models list|show`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from coordinator.cli import main as cli


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert cli.main(["models", *words, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_models_of_the_papers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """As people type them, numbers in their order."""
    listed = _json(capsys, "list")
    assert listed == [
        *(f"densenet{n}" for n in (121, 161, 169, 201)),
        *("har-cnn", "har-transformer", "mlp", "preresnet20"),
        *(f"resnet{n}" for n in (10, 14, 18, 22, 26, 34, 50, 101, 152)),
        "small-cnn",
        *(f"vit-s-{n}" for n in (8, 9, 10, 11, 12)),
        "vit-t-16",
    ]
    assert cli.main(["models", "list", "-q"]) == 0
    assert capsys.readouterr().out.split() == listed
    assert cli.main(["models", "list"]) == 0
    assert "har-cnn          9x128        width=32 track-running-stats=true\n" in capsys.readouterr().out


def test_a_list_loads_no_torch() -> None:
    """Nor does the command by itself; only `show` builds something."""
    code = (
        "import sys\n"
        "from coordinator.cli.main import main\n"
        "main(['models', 'list', '-q'])\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_a_model_is_shown_with_its_units(capsys: pytest.CaptureFixture[str]) -> None:
    """preresnet20: B1 of FeDepth's Table 1 is 2 x 4 x 32 x 5 x 16,384 + 4 x 4,672 = 20,990,208 bytes, 20.02 MiB."""
    data = _json(capsys, "show", "preresnet20")
    assert (data["name"], data["slice"], data["parameters"]) == ("preresnet20", "full", 272_282)
    assert (data["input"], data["classes"], data["batch"]) == ([3, 32, 32], 10, 32)
    assert [unit["name"] for unit in data["units"]] == ["stem", *(f"block{k}" for k in range(1, 10)), "head"]
    first = data["units"][1]
    assert {key: first[key] for key in ("kind", "stage", "index", "in_shape", "out_shape", "parameters")} == {
        "kind": "block",
        "stage": 1,
        "index": 0,
        "in_shape": [16, 32, 32],
        "out_shape": [16, 32, 32],
        "parameters": 4_672,
    }
    assert first["table_1_rule_bytes"] == 20_990_208
    assert sum(unit["parameters"] for unit in data["units"]) == 272_282
    assert data["taps"]["conv_19"] == "block9.conv2"


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        (["resnet26", "--slice", "depth:1.1.1.1"], 4_910_922),
        (["resnet26", "--slice", "resnet10"], 4_910_922),
        (["resnet26", "--slice", "width:1/16"], 69_822),
        (["resnet26", "--set", "base-width=4", "--input", "3x8x8"], 69_822),
        (["resnet10", "--classes", "100"], 4_957_092),
        (["mlp", "--set", "hidden=[]", "--input", "7", "--classes", "2"], 16),
        (["preresnet20", "--set", "shortcut=pad"], 269_722),
        (["har-cnn", "--input", "9x64"], 43_498),
    ],
)
def test_a_model_is_shown_as_a_run_would_set_it(
    capsys: pytest.CaptureFixture[str], words: list[str], parameters: int
) -> None:
    """Slices, options, shapes and classes; the published counts, and a linear model of 7 x 2 + 2."""
    assert _json(capsys, "show", *words)["parameters"] == parameters


def test_the_table_has_shapes_and_the_papers_rule(capsys: pytest.CaptureFixture[str]) -> None:
    """har-cnn at width 2, batch 1: 2 x 9 x 5 + 4 = 94, 2 x 4 x 5 + 8 = 48 and 4 x 10 + 10 = 50 parameters.

    The stem's convolution and norm put out 2 x 128, its pooling 2 x 64: 2 x 4 x 640 + 4 x 94 = 5,496 bytes.
    """
    assert cli.main(["models", "show", "har-cnn", "--set", "width=2", "--batch", "1", "--slice", "depth:0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "har-cnn, slice depth:0.1: 192 parameters, input 9x128, 10 classes"
    assert lines[2].split() == ["unit", "kind", "stage", "in", "out", "parameters", "table-1", "rule"]
    assert lines[4].split() == ["stem", "stem", "0", "9x128", "2x64", "94", "5.5", "kB"]
    assert lines[5].split()[:6] == ["stage2_block1", "block", "2", "2x64", "4x32", "48"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["resnet2"], 7, "unknown model 'resnet2'"),
        (["resnet10", "--set", "base_with=3"], 3, "did you mean 'base-width'"),
        (["resnet10", "--set", "base-width"], 3, "expected KEY=VALUE"),
        (["resnet10", "--slice", "half"], 3, "slice 'half': expected full"),
        (["resnet10", "--slice", "resnet50"], 7, "unknown slice of resnet10"),
        (["resnet10", "--slice", "resnet26"], 3, "expected 0 to 1, 1, 1, 1 blocks in the stages, got 3, 3, 3, 3"),
        (["resnet10", "--input", "3by4"], 3, "a shape such as 3x96x96"),
        (["resnet10", "--classes", "0"], 3, "at least one class"),
        (["resnet10", "--batch", "0"], 3, "expected 1 or more, got 0"),
    ],
)
def test_mistakes_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    """With the exit codes of all commands."""
    assert cli.main(["models", "show", *words]) == code
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert message in told


def test_what_training_takes_is_measured_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    """An MLP with blocks of 256 x 4000 and 4000 x 10 floats: gradients of 4.1 MB and of 160 kB."""
    words = ["show", "mlp", "--input", "256", "--set", "hidden=[4000,10]", "--batch", "4", "--measure"]
    shown = _json(capsys, *words)
    alone = {unit["name"]: unit["training_bytes"] for unit in shown["units"] if unit["kind"] == "block"}
    assert alone.keys() == {"block1", "block2"}
    assert alone["block1"] > alone["block2"] + 3 * 10**6
    assert shown["training_bytes"] > 4 * (256 * 4000 + 4000 * 10)
    assert cli.main(["models", *words]) == 0
    assert "all blocks at once" in capsys.readouterr().out


def test_a_shape_may_have_a_large_x(capsys: pytest.CaptureFixture[str]) -> None:
    """As `edge-client plan` reads it, too."""
    assert _json(capsys, "show", "mlp", "--input", "1X8X8") == _json(capsys, "show", "mlp", "--input", "1x8x8")
