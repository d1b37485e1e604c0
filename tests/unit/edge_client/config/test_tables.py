"""Mistakes in a file are named with file, section and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client.config.run_file import RunFile, load_run_file
from edge_client.config.tables import parse_table
from edge_client.errors import InputError

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


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, and not UTF-8."""
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe4"')
    for name in ("missing.toml", "latin.toml"):
        with pytest.raises(InputError, match=name):
            load_run_file(tmp_path / name)


NOT_YET = [
    (RunFile, "train.augment"),
]


@pytest.mark.parametrize(("cls", "key"), NOT_YET, ids=[key for _, key in NOT_YET])
def test_a_key_that_is_not_served_yet_is_refused_by_its_name(cls: type, key: str) -> None:
    """Not ignored, and not taken for a typing error; the page of the files names it too."""
    section, _, name = key.rpartition(".")
    table = {section: {name: True}}
    with pytest.raises(InputError, match=f"'{key}' is not served by this version of fedfit yet"):
        parse_table(cls, table, source="x.toml")
    assert f"`{key}`" in (Path(__file__).parents[4] / "docs" / "reference/files.md").read_text(encoding="utf-8")
