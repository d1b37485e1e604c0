"""What a person may write into `run.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_client.config.run_file import ModelSection, RunFile, TrainSection, check_run_file, load_run_file
from edge_client.config.tables import parse_table, to_table
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


@pytest.mark.parametrize(
    ("num_samples", "epochs"), [(0, 10), (1, 10), (31, 10), (33, 10), (360, 4), (1000, 2), (100_000, 1)]
)
def test_automatic_epochs_make_about_fifty_steps(num_samples: int, epochs: int) -> None:
    """At batch 32: 33 samples are 2 steps, 50 / 2 = 25, at most 10; 360 are 12, 50 / 12 = 4.2; 1000 are 32, 1.6."""
    train = parse_table(TrainSection, {"epochs": "auto"}, source="x.toml")
    assert train.epochs_of(num_samples) == epochs <= train.most_epochs


def test_epochs_that_are_named_hold_for_every_device() -> None:
    """However many samples it has."""
    train = TrainSection(epochs=3)
    assert [train.epochs_of(n) for n in (1, 10**6)] == [3, 3]
    assert train.most_epochs == 3


@pytest.mark.parametrize(("value", "shown"), [("many", '"many"'), (True, "true"), (2.5, "2.5")])
def test_epochs_are_a_number_or_auto(value: object, shown: str) -> None:
    """The message names both."""
    with pytest.raises(InputError) as caught:
        parse_table(RunFile, {"train": {"epochs": value}}, source="run.toml")
    assert f'run.toml: train.epochs: expected a number from 1 to 1000 or "auto", got {shown}' in str(caught.value)


def test_automatic_epochs_survive_the_table_and_the_map(tmp_path: Path) -> None:
    """A run's folder holds the file as a table, the store as a map."""
    train = TrainSection(epochs=None, warm_up=True)
    assert to_table(train)["epochs"] == "auto"
    assert parse_table(TrainSection, to_table(train), source="x") == train == from_map(TrainSection, to_map(train))


def test_a_run_without_new_keys_is_sent_as_before() -> None:
    """Clients of 0.1.0 refuse keys that they do not know."""
    assert "warm_up" not in to_map(TrainSection())
    assert to_map(TrainSection(warm_up=True))["warm_up"] is True
