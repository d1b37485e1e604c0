"""`coordinator new`: what it writes can be used as it stands, and says the truth about every default."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from coordinator.cli import main as cli
from coordinator.cli import new
from coordinator.run_check import check_run
from coordinator.simulation.run_options import Flags, Missing, combinations, complete
from edge_client import faults
from edge_client.config.device_file import DeviceFile, load_device_file
from edge_client.config.key_descriptions import describe
from edge_client.config.run_file import RunFile, load_run_file
from edge_client.errors import DiskFullError
from edge_client.task.task import Device, load_task

KEY = re.compile(r"# [a-z0-9-]+ = ")
EXAMPLES = {"max-steps", "target", "hours", "where", "rename", "labels", "tasks"}  # they have no default


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A fresh folder."""
    new.make_folder(new.NewOptions(folder=tmp_path / "defects", every_key=True))
    return tmp_path / "defects"


def uncommented(path: Path) -> dict[str, str]:
    """Key line -> the file's text with only this line's `#` taken away."""
    lines = path.read_text(encoding="utf-8").splitlines()
    keys = [number for number, line in enumerate(lines) if KEY.match(line)]
    return {lines[n]: "\n".join([*lines[:n], lines[n].removeprefix("# "), *lines[n + 1 :]]) for n in keys}


def key_of(line: str) -> str:
    return line.removeprefix("# ").partition(" ")[0]


def without_model(text: str) -> str:
    return re.sub(r"^\[model\].*?^\n", "", text, flags=re.MULTILINE | re.DOTALL)


def test_the_files_load_as_they_stand(made: Path) -> None:
    """The run has the folder's name and the classes of the example; it passes what `run start` checks."""
    run = load_run_file(made / "run.toml")
    check_run(run)
    assert (run.name, run.classes, run.stop.rounds) == ("defects", ("ok", "scratch", "dent"), 10)
    assert run.model is not None
    assert (run.model.name, run.model.input) == ("small-cnn", (3, 96, 96))
    device = load_device_file(made / "device.toml")
    assert device.data is not None
    assert (device.data.source, device.data.train) == ("image-folder", "/data/defects/train")


def test_every_default_that_is_shown_is_the_default(made: Path, tmp_path: Path) -> None:
    """Taking one # away changes nothing, unless the line is an example: then it changes something and is accepted."""
    path, base = tmp_path / "changed.toml", load_run_file(made / "run.toml")
    for line, text in uncommented(made / "run.toml").items():
        if key_of(line) == "task":
            continue
        path.write_text(text)
        changed = load_run_file(path)
        check_run(changed)
        if key_of(line) == "width":  # the model's own: the registry knows its default
            assert changed.model is not None
            assert changed.model.options == {"width": 32}
        else:
            assert (changed == base) == (key_of(line) not in EXAMPLES), line
    device = load_device_file(made / "device.toml")
    for line, text in uncommented(made / "device.toml").items():
        path.write_text(text)
        assert (load_device_file(path) == device) == (key_of(line) not in EXAMPLES), line


def test_every_key_of_the_schema_stands_there(made: Path) -> None:
    """As a live key, behind a #, or in the explanation of a task."""
    for name, cls in (("run.toml", RunFile), ("device.toml", DeviceFile)):
        text = (made / name).read_text(encoding="utf-8")
        for row in describe(cls):
            key = row.key.rpartition(".")[2]
            if row.type == "table" and row.key != "task":
                assert f"\n[{key}] " in text
            elif key != "*":
                assert re.search(rf"^(# )?{key} = |^#     {key}: ", text, re.MULTILINE), row.key


@pytest.mark.parametrize("number", [0, 1])
def test_the_task_is_one_line_away(made: Path, number: int) -> None:
    """Both ways to write it, with [model] removed as the comment says."""
    lines = {line: text for line, text in uncommented(made / "run.toml").items() if key_of(line) == "task"}
    assert len(lines) == 2
    (made / "run.toml").write_text(without_model(list(lines.values())[number]))
    run = load_run_file(made / "run.toml")
    assert run.task is not None
    assert run.task.name == "defects"
    assert run.task.file in ("", "defects.py:task")


def test_the_example_task_works(made: Path, tmp_path: Path) -> None:
    """Its model takes a batch of its own input and tells three classes apart; its data opens an image folder."""
    task = load_task(f"{made / 'defects.py'}:task")
    assert task.input is not None
    assert task.model(3)(torch.zeros(2, *task.input)).shape == (2, 3)
    for kind in ("ok", "dent"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / kind / "1.png")
    folder = str(tmp_path / "images")
    device = Device(name="d", data={"train": folder, "test": folder}, classes=("ok", "dent"), labels={})
    assert task.test_data is not None
    assert task.train_data(device) is not None
    assert task.test_data(device) is not None


@pytest.mark.parametrize(
    ("options", "shape"), [((), "3x96x96"), (("--model", "mlp"), "64"), (("--model", "small-cnn"), "1x28x28")]
)
def test_options_go_into_the_files(
    tmp_path: Path, options: tuple[str, ...], shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Classes with quotes and beyond ASCII, another model, another shape; it says what to do next."""
    folder = tmp_path / "a-b_1"
    names = 'kratzer "tief",\N{GRINNING FACE},x\x7f'
    assert cli.main(["new", str(folder), "--classes", names, "--input", shape, "--all", *options]) == 0
    run = load_run_file(folder / "run.toml")
    check_run(run)
    assert run.classes == ('kratzer "tief"', "\N{GRINNING FACE}", "x\x7f")
    assert run.model is not None
    assert run.model.input == tuple(int(n) for n in shape.split("x"))
    load_device_file(folder / "device.toml")
    task = load_task(f"{folder / 'a-b_1.py'}:task")
    assert task.input is not None
    assert task.model(3)(torch.zeros(1, *task.input)).shape == (1, 3)
    assert f"coordinator run start {folder / 'run.toml'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["no id!"], 3),
        (["x" * 65], 3),
        (["d", "--classes", "one"], 3),
        (["d", "--classes", "a,a"], 3),
        (["d", "--classes", "a,\udcff"], 3),
        (["d", "--model", "resnet999"], 3),
        (["d", "--input", "3x96xfoo"], 3),
        (["d", "--input", "0"], 3),
        (["d", "--input", "3x2x2"], 3),
    ],
)
def test_bad_values_leave_nothing_behind(
    tmp_path: Path, arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and no folder."""
    folder, *options = arguments
    assert cli.main(["new", str(tmp_path / folder), *options]) == code
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["run.toml", "device.toml", "d.py"])
def test_nothing_is_overwritten(tmp_path: Path, file: str) -> None:
    """Exit code 8 if any of the three is there; an existing folder without them is fine."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / file).write_text("mine")
    assert cli.main(["new", str(tmp_path / "d"), "--all"]) == 8
    assert [(p.name, p.read_text()) for p in (tmp_path / "d").iterdir()] == [(file, "mine")]
    (tmp_path / "d" / file).unlink()
    assert cli.main(["new", str(tmp_path / "d"), "--all"]) == 0


def test_a_full_disk_leaves_no_half_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file does not fit: the first goes too, and the next try works."""
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:new.file.sync:2")])
    with pytest.raises(DiskFullError, match="cannot write"):
        new.make_folder(new.NewOptions(folder=tmp_path / "d", every_key=True))
    assert list((tmp_path / "d").iterdir()) == []
    assert len(new.make_folder(new.NewOptions(folder=tmp_path / "d", every_key=True))) == 3


def test_without_all_the_file_has_a_screenful_of_live_keys(tmp_path: Path) -> None:
    """At most 30 lines, one file, and the run is the same as that of --all."""
    (short,) = new.make_folder(new.NewOptions(folder=tmp_path / "a" / "defects"))
    full = new.make_folder(new.NewOptions(folder=tmp_path / "b" / "defects", every_key=True))[0]
    lines = short.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines[2:])) <= 118
    assert load_run_file(short) == replace(load_run_file(full), simulate=None)  # of which --all writes the head


def test_the_training_is_the_one_that_simulate_takes_without_a_file(tmp_path: Path) -> None:
    """One set of settings: what a person tries in a simulation is what the devices train."""
    (path,) = new.make_folder(new.NewOptions(folder=tmp_path / "defects"))
    (combination,) = combinations(Flags())
    simulated = complete(combination, Missing(shape=(1, 8, 8), classes=("a", "b")))
    assert load_run_file(path).train == simulated.train
    assert simulated.train.normalise
    assert simulated.train.epochs is None


def test_data_fills_in_classes_and_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seven images of 40 x 30 in train/, of two classes: their shorter side is the model's; the command comes next."""
    for kind, count in (("cat", 4), ("plane", 3)):
        (tmp_path / "data" / "train" / kind).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (40, 30)).save(tmp_path / "data" / "train" / kind / f"{number}.png")
    assert cli.main(["new", str(tmp_path / "photos"), "--data", str(tmp_path / "data")]) == 0
    run = load_run_file(tmp_path / "photos" / "run.toml")
    assert run.classes == ("cat", "plane")
    assert run.model is not None
    assert run.model.input == (3, 30, 30)
    out = capsys.readouterr().out
    assert "found 2 classes (cat, plane), 7 images of 40 x 30, which devices resize to 30 x 30; up to 10 rounds" in out
    assert f"next: coordinator run start {tmp_path / 'photos' / 'run.toml'} --follow" in out


def test_data_of_one_class_or_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing can be told apart; nothing is written."""
    (tmp_path / "data" / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "data" / "cat" / "1.png")
    assert cli.main(["new", str(tmp_path / "photos"), "--data", str(tmp_path / "data")]) == 3
    assert "expected two classes or more, got cat" in capsys.readouterr().err
    assert cli.main(["new", str(tmp_path / "photos"), "--data", str(tmp_path / "nowhere")]) == 3
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "photos").exists()
