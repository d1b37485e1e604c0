"""The two files that people write, and sizes and durations as people write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_client.config.run_file import ModelSection, RunFile, check_run_file, load_run_file
from edge_client.config.tables import (
    DeviceFile,
    format_bytes,
    load_device_file,
    parse_bytes,
    parse_duration,
    parse_table,
)
from edge_client.errors import InputError
from edge_client.records import from_map, to_map

RUN = """
name = "digits"
classes = ["0", "1"]
method = "fedprox"
[model]
name = "small-cnn"
input = [1, 8, 8]
width = 4
[train]
max-steps = 5
[rounds]
deadline = "2min"
"""


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "file.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MB", 512_000_000),
        ("1.5GiB", 1_610_612_736),
        (" 2 kb ", 2000),
        ("0.3GB", 300_000_000),
        ("1.1GB", 1_100_000_000),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1: no float holds it
        ("0.0000000001B", 0),
    ],
)
def test_sizes_are_exact(text: str, expected: int) -> None:
    """Decimal and binary units, whole bytes."""
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MB", "-1", "1.5.5GB", "1 TB", "1e9", "9" * 400, "nan", ".5GB"])
def test_what_is_no_size(text: str) -> None:
    """Also numbers that are longer than any disk."""
    with pytest.raises(InputError, match="expected a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("30min", 1800), ("1.5h", 5400), ("250ms", 0.25), ("2d", 172800)]
)
def test_durations(text: str, expected: float) -> None:
    """In seconds."""
    assert parse_duration(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "90", "s", "-1s", "1 week", "1H"])
def test_what_is_no_duration(text: str) -> None:
    """A unit is needed."""
    with pytest.raises(InputError, match="expected a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (1_500_000_000, "1.5 GB"),
        (5 * 10**12, "5000 GB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    """Three digits, the next unit when they would not do."""
    assert format_bytes(count) == text


def test_a_run_file_is_read(tmp_path: Path) -> None:
    """Short and long forms, dashes, units; what a section does not know is the model's own option."""
    run = load_run_file(_write(tmp_path, RUN))
    assert (run.method.name, run.model.name, run.model.input) == ("fedprox", "small-cnn", (1, 8, 8))
    assert run.model.options == {"width": 4}
    assert run.train.max_steps == 5
    assert run.rounds.deadline == 120.0
    assert (run.seed, run.stop.rounds, run.devices.fraction) == (1, 10, 1.0)


def test_a_run_file_survives_the_store(tmp_path: Path) -> None:
    """As plain data and back."""
    run = load_run_file(_write(tmp_path, RUN))
    assert from_map(RunFile, to_map(run)) == run


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("max-steps = 5", "max-step = 5", "unknown key 'train.max-step'; did you mean 'max-steps'"),
        ("max-steps = 5", "max-steps = 5\nmax_steps = 6", "stands there twice"),
        ("max-steps = 5", "max-steps = true", "train.max-steps: expected int, got bool"),
        ("max-steps = 5", "lr = nan", "train.lr: expected a finite number"),
        ("max-steps = 5", "lr = -1", "train.lr: expected 0 to 1000"),
        ('deadline = "2min"', 'deadline = "2 fortnights"', "rounds.deadline: expected a duration"),
        ('deadline = "2min"', 'codec = "fp8"', "rounds.codec: 'fp8' does not match"),
        ('name = "digits"', "", "name is missing"),
        ('name = "digits"', 'name = "a/b"', "name: 'a/b' does not match"),
        ('name = "small-cnn"', "", "model.name is missing"),
        ('classes = ["0", "1"]', "classes = 2", "classes: expected a list"),
        ('method = "fedprox"', "method = 3", "method: expected a table"),
        ("[train]", "[trian]", "did you mean 'train'"),
        ("[train]", "[train", "is not valid TOML"),
    ],
)
def test_a_mistake_is_named_with_file_section_and_key(tmp_path: Path, old: str, new: str, expected: str) -> None:
    """So that it is fixed in seconds."""
    assert old in RUN
    path = _write(tmp_path, RUN.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_run_file(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_device_file_is_read(tmp_path: Path) -> None:
    """A budget with a unit, labels, and defaults for an empty file."""
    text = '[limits]\nmemory = "1.5GB"\n[labels]\nsite = "north"\n[data]\nsource = "digits"\npart = [1, 4]\n'
    device = load_device_file(_write(tmp_path, text))
    assert device.limits.memory == 1_500_000_000
    assert device.labels == {"site": "north"}
    assert device.data is not None
    assert device.data.part == (1, 4)
    assert load_device_file(_write(tmp_path, "")) == DeviceFile()


@pytest.mark.parametrize(
    "labels", [{f"k{i}": "v" for i in range(65)}, {f"k{i}": "ü" * 2000 for i in range(3)}], ids=["many", "long"]
)
def test_labels_must_fit_one_message(tmp_path: Path, labels: dict[str, Any]) -> None:
    """Otherwise the device could never say hello."""
    text = "[labels]\n" + "".join(f'{key} = "{value}"\n' for key, value in labels.items())
    with pytest.raises(InputError, match="at most 64 labels and 8192 bytes"):
        load_device_file(_write(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, and not UTF-8."""
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe4"')
    for name in ("missing.toml", "latin.toml"):
        with pytest.raises(InputError, match=name):
            load_run_file(tmp_path / name)


NOT_YET = [
    (RunFile, "train.augment"),
    (DeviceFile, "limits.accelerator"),
]


@pytest.mark.parametrize(("cls", "key"), NOT_YET, ids=[key for _, key in NOT_YET])
def test_a_key_that_is_not_served_yet_is_refused_by_its_name(cls: type, key: str) -> None:
    """Not ignored, and not taken for a typing error; the page of the files names it too."""
    section, _, name = key.rpartition(".")
    table = {section: {name: True}}
    with pytest.raises(InputError, match=f"'{key}' is not served by this version of fedfit yet"):
        parse_table(cls, table, source="x.toml")
    assert f"`{key}`" in (Path(__file__).parents[4] / "docs" / "files.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"task": {"name": "t"}}, "expected either model or task, got both"),
        ({"model": None}, "expected either model or task, got neither"),
        ({"classes": ["a", "a"]}, "expected two or more different names"),
        ({"name": "n" * 49}, "name: expected at most 48 characters, got 49"),
        ({"stop": {"target": 0.5}, "evaluate": {"every": 0}}, "stop.target needs evaluations"),
        ({"stop": {"target": 95.0}}, "stop.target: expected 0 to 1 for accuracy, got 95"),
        ({"stop": {"target": -1.0, "metric": "loss"}}, "stop.target: expected 0 or more for loss, got -1"),
    ],
)
def test_what_no_single_key_can_tell_is_checked(changes: dict[str, Any], problem: str) -> None:
    """A whole run file, with two keys that do not go together."""
    base: dict[str, Any] = {"name": "r", "model": {"name": "mlp", "input": [4]}, "classes": ["a", "b"]}
    table = {key: value for key, value in (base | changes).items() if value is not None}
    with pytest.raises(InputError, match=problem):
        check_run_file(parse_table(RunFile, table, source="x.toml"))


@pytest.mark.parametrize(
    "text",
    ["run:", "run:a b", "run:a@first", "best", "RANDOM", "run:a@-1"],
)
def test_starting_weights_name_a_run_or_nothing(text: str) -> None:
    """`random`, `run:ID`, `run:ID@last`, `run:ID@best`, `run:ID@7`; the error repeats what is possible."""
    for good in ("random", "run:a-1", "run:a-1@last", "run:a-1@best", "run:a-1@7"):
        parse_table(ModelSection, {"name": "mlp", "input": [4], "init": good}, source="x.toml")
    with pytest.raises(InputError, match=r"init.*run:ID@best"):
        parse_table(ModelSection, {"name": "mlp", "input": [4], "init": text}, source="x.toml")
