"""`coordinator methods list|show`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aggregator_jobs import do_job
from rows import run_file

from coordinator.cli import main as cli
from edge_client.methods import registry
from edge_client.records import to_map


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert cli.main(["methods", *words, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_methods_are_listed_with_papers_and_what_they_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the registry, pairs included."""
    listed = _json(capsys, "list")
    assert [row["name"] for row in listed] == registry.names()
    assert {row["name"]: row["exchanges"]["up"] for row in listed}["fedper"] == "model without personal layers"
    assert all(row["paper"] for row in listed)
    assert cli.main(["methods", "list", "-q"]) == 0
    assert capsys.readouterr().out.split() == registry.names()
    assert cli.main(["methods", "list"]) == 0
    assert "arXiv:1910.06378" in capsys.readouterr().out


def test_the_list_loads_no_torch() -> None:
    """What it shows stands on the cards."""
    code = "import sys; from coordinator.cli import main; main.main(['methods', 'list']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedper", "m-fedepth", "inco+scaffold"])
def test_the_bytes_down_are_those_of_the_file_that_a_run_sends(
    name: str, codec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The aggregator makes and encodes the first model of a run; its length is what `show` says."""
    run = run_file(
        model={"name": "har-cnn", "input": [9, 32]},
        classes=["a", "b", "c"],
        method={"name": name},
        rounds={"codec": codec},
    )
    made = do_job({"id": 1, "job": "init", "run": to_map(run), "out": str(tmp_path / "m")})
    assert made["ok"], made
    job = {"id": 2, "job": "encode", "run": to_map(run), "model": str(tmp_path / "m"), "out": str(tmp_path / "sent")}
    sent = do_job(job)
    words = ["--model", "har-cnn", "--input", "9x32", "--classes", "3", "--codec", codec]
    shown = _json(capsys, "show", name, *words)
    assert shown["bytes_down"] == sent["length"] == (tmp_path / "sent").stat().st_size


def test_what_is_shown_of_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    """small-cnn has 29,066 parameters in 6 tensors: 4 bytes each, and a header of less than 1 kB."""
    plain = _json(capsys, "show", "fedavg")
    assert plain["parameters"] == []
    assert 4 * 29_066 < plain["bytes_down"] < plain["bytes_up"] < 4 * 29_066 + 1024
    moon = _json(capsys, "show", "moon")
    assert (moon["bytes_up"], moon["bytes_down"]) == (plain["bytes_up"], plain["bytes_down"])
    assert [(p["name"], p["symbol"], p["default"], p["range"]) for p in moon["parameters"]] == [
        ("mu", "mu", 1.0, "0 to 1000"),
        ("temperature", "tau", 0.5, "0.001 to 1000"),
    ]
    assert moon["paper"] == "Li et al., CVPR 2021, arXiv:2103.16257"
    assert moon["exchanges"] == {"down": "model", "up": "model", "device": "model after its last round"}


def test_inco_is_shown_with_a_model_that_it_can_change(capsys: pytest.CaptureFixture[str]) -> None:
    """PreResNet-20, whatever is underneath; what travels is what the method underneath sends."""
    shown, plain = _json(capsys, "show", "inco+fedavg"), _json(capsys, "show", "fedavg", "--model", "preresnet20")
    assert shown["model"]["name"] == "preresnet20"
    assert shown["bytes_up"] == plain["bytes_up"]
    assert 0 < shown["bytes_down"] - plain["bytes_down"] <= 512  # the names of 15 anchors and targets
    assert [row["name"] for row in shown["parameters"]][:2] == ["rule", "granularity"]


def test_each_slice_has_its_own_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """An mlp of 784-64-10 in four bases: a quarter of the width is one of them, 784 x 16 + 16 + 16 x 10 + 10."""
    shown = _json(capsys, "show", "splitmix", "--model", "mlp", "--set", "bases=4", "--slices", "full,width:1/4")
    base = 4 * (784 * 16 + 16 + 16 * 10 + 10)
    found = {row["slice"]: row["bytes_down"] for row in shown["slices"]}
    assert base < found["width:1/4"] < base + 1024
    assert 4 * base < found["full"] == shown["bytes_down"] < 4 * base + 2048
    assert cli.main(["methods", "show", "heterofl"]) == 0
    assert "width:1/16" in capsys.readouterr().out
    assert _json(capsys, "show", "fedavg")["slices"] == []


def test_personal_layers_do_not_travel_up_and_nothing_does_twice_in_local(capsys: pytest.CaptureFixture[str]) -> None:
    """FedPer: without the head, 1024 x 10 + 10 parameters; Local: the model once, then a report of its own."""
    plain, personal = _json(capsys, "show", "fedavg"), _json(capsys, "show", "fedper")
    saved = plain["bytes_up"] - personal["bytes_up"]
    assert 4 * 10_250 <= saved < 4 * 10_250 + 192
    assert _json(capsys, "show", "fedper", "--set", "personal=0")["bytes_up"] == plain["bytes_up"]
    local = _json(capsys, "show", "local")
    assert (local["bytes_down"], local["bytes_once"]) == (0, pytest.approx(plain["bytes_down"], abs=64))
    assert 0 < local["bytes_up"] < 1024


def test_scaffold_moves_twice_as_much(capsys: pytest.CaptureFixture[str]) -> None:
    """A control variate for each parameter; for a model with buffers a little less than twice."""
    plain, scaffold = (_json(capsys, "show", name, "--model", "mlp") for name in ("fedavg", "scaffold"))
    parameters = 4 * 50_890
    for way in ("bytes_up", "bytes_down"):
        assert parameters < scaffold[way] - plain[way] < parameters + 512


KNOWN = [  # method, numbers both ways on top of FedAvg's, or instead; once
    ("felo", 10 * (1024 + 10), 0, True),
    ("fedin", 16 * (32 * 14 * 14 + 1024), 0, True),
    ("fedhe", 10 * 10, 0, False),
    ("fedproto", 10 * 1024, 0, False),
    ("fedmd", 1000 * 10, 1000 * 28 * 28, False),
    ("draftfed", 128 * (32 * 28 * 28 + 64 * 14 * 14 + 10), 512 * 28 * 28, False),
]


@pytest.mark.parametrize(("name", "numbers", "once", "weights"), KNOWN, ids=[name for name, *_ in KNOWN])
def test_knowledge_has_the_bytes_of_the_papers_formulas(
    name: str, numbers: int, once: int, weights: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """small-cnn on 1x28x28: 32x14x14 behind the stem, 1024 features, 10 classes; 1 % and 512 bytes of framing."""
    plain, shown = _json(capsys, "show", "fedavg"), _json(capsys, "show", name)
    report = 700 if not weights else 0
    for way in ("bytes_up", "bytes_down"):
        beside = shown[way] - (plain[way] if weights else 0)
        assert 4 * numbers <= beside <= 1.01 * 4 * numbers + 512 + report
    first = shown["bytes_once"] - (0 if weights else plain["bytes_down"])
    assert 4 * once - 64 <= first <= 1.01 * 4 * once + 512


def test_felo_costs_nearly_nothing_beside_a_resnet18(capsys: pytest.CaptureFixture[str]) -> None:
    """20,880 bytes of knowledge beside 44.8 MB of weights: less than .05 %."""
    how = ("--model", "resnet18", "--input", "3x32x32")
    plain, felo = _json(capsys, "show", "fedavg", *how), _json(capsys, "show", "felo", *how)
    for way in ("bytes_up", "bytes_down"):
        assert 1 < felo[way] / plain[way] <= 1.0005


def test_a_table_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Symbols, defaults, the model, and its bytes: 2 x 29,066 and a header of 256."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert cli.main(["methods", "show", "fedepth+fedprox", "--codec", "fp16"]) == 0
    out = capsys.readouterr().out
    assert "mu           mu                0.01" in out
    assert "per round and device: 58.4 kB down, 58." in out
    assert "(small-cnn, input 1x28x28, 10 classes, fp16)" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["fedsgd"], 7, "unknown method 'fedsgd'; known: draftfed, fedavg"),
        (["moon", "--set", "mu=-1"], 3, "mu: expected 0 to 1000, got -1.0; mu in the paper"),
        (["fedper", "--set", "personal=3"], 3, "personal = 3 shares nothing, the model has 3 units"),
        (["fedavg", "--classes", "1"], 3, "--classes: expected 2 or more, got 1"),
        (["fedavg", "--model", "vgg"], 7, "unknown model 'vgg'"),
        (["scalefl", "--slices", "full,exit:1-width:1/2"], 3, "this model has no exits; use another (mlp, a resnet"),
    ],
)
def test_what_makes_no_sense_is_said(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and an exit code that tells which kind of mistake it was."""
    assert cli.main(["methods", "show", *words]) == code
    assert message in capsys.readouterr().err


def test_every_line_fits_into_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """80 columns, the list and the method with the longest texts; a pipe gets one line per method."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert cli.main(["methods", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(registry.names())
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["list"], ["show", "inco+scaffold"]):
        assert cli.main(["methods", *words]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_what_travels_once_is_shown_of_each_slice(capsys: pytest.CaptureFixture[str]) -> None:
    """FedHe sends a device its first model once: less of a slice."""
    words = ["show", "fedhe", "--model", "preresnet20", "--slices", "full,depth:1.1.1"]
    shown = _json(capsys, *words)
    assert shown["slices"][0]["bytes_once"] > shown["slices"][1]["bytes_once"] > 0
    assert cli.main(["methods", *words]) == 0
    text = capsys.readouterr().out
    assert "once, down" in text
    assert "once, down" not in _text(capsys, "show", "felo", "--model", "preresnet20", "--slices", "full,depth:1.1.1")


def _text(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["methods", *words]) == 0
    return capsys.readouterr().out
