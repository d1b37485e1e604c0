"""`coordinator run start --set KEY=VALUE`: instead of what the file says, checked like the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli import runs
from edge_client.errors import InputError

RUN = 'name = "a"\nclasses = ["x", "y"]\nmodel = { name = "small-cnn", input = [1, 8, 8] }\ntrain = { lr = 0.5 }\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small run file."""
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    return tmp_path / "run.toml"


def test_typed_settings_take_the_place_of_the_files(path: Path) -> None:
    """A key of a table, a key of the file itself; the others stay."""
    file = runs._load(path, ["train.lr=0.1", "seed=7", "train.epochs=auto"])
    assert (file.train.lr, file.train.epochs, file.seed, file.name) == (0.1, None, 7, "a")
    assert runs._load(path, []).train.lr == 0.5


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("lr=0.1", "did you mean train.lr?"),
        ("train.lrr=0.1", "did you mean 'lr'?"),
        ("train.epochs=many", 'expected a number from 1 to 1000 or "auto"'),
        ("train", "expected KEY=VALUE"),
    ],
)
def test_what_is_mistyped_is_one_line(path: Path, typed: str, message: str) -> None:
    """It says what to type instead."""
    with pytest.raises(InputError) as caught:
        runs._load(path, [typed])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
