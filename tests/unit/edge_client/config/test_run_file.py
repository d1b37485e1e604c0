"""What a person may write into `run.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_client.config.run_file import ModelSection, RunFile, check_run_file, load_run_file
from edge_client.config.tables import parse_table
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
