"""The folder of a simulated run: when it may be used, and what it remembers."""

from __future__ import annotations

from pathlib import Path

import pytest
from rows import run_file

from coordinator.results.run_directory import DATA, RunDirectory
from edge_client.config.run_file import load_run_file
from edge_client.errors import ConflictError

FILE = run_file(method={"name": "fedprox", "mu": 0.5}, simulate={"data": "digits", "training-budgets": ["40MB"]})


def test_a_new_folder_is_begun_resumed_and_finished(tmp_path: Path) -> None:
    """None until there is a result; then the result; the state and its model's file are gone, the model stays."""
    directory = RunDirectory(tmp_path / "a" / "b")
    assert directory.check(FILE) is None
    directory.begin(FILE)
    assert load_run_file(directory.path / "run.toml") == FILE
    directory.state.mkdir()
    model = directory.state / "blob"
    model.write_bytes(b"model")
    assert directory.check(FILE) is None
    directory.finish({"accuracy": 0.5}, model)
    assert directory.check(FILE) == {"accuracy": 0.5}
    assert sorted(path.name for path in directory.path.iterdir()) == ["model.bin", "result.json", "run.toml"]


def test_another_file_is_refused_with_what_changed(tmp_path: Path) -> None:
    """The key with both values; of ten changes (seed, 2 of method, 2 of stop, 5 of simulate) five are told."""
    directory = RunDirectory(tmp_path)
    directory.begin(FILE)
    other = run_file(method={"name": "fedprox", "mu": 0.25}, simulate={"data": "digits", "training-budgets": ["40MB"]})
    with pytest.raises(ConflictError, match=r"\(method.mu: 0.5 there, 0.25 now\); name another folder with --out"):
        directory.check(other)
    with pytest.raises(ConflictError, match=r"method.mu: 0.5 there, nothing now.*; and 5 more\)"):
        directory.check(run_file(seed=2, stop={"rounds": 3, "target": 0.5}))


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Nothing in it is touched; what a killed start left there is our own."""
    (tmp_path / DATA).mkdir()
    assert RunDirectory(tmp_path).check(FILE) is None
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConflictError, match="is not empty and holds no simulation"):
        RunDirectory(tmp_path).check(FILE)


def test_a_damaged_run_file_is_not_taken_for_the_same(tmp_path: Path) -> None:
    """It names the file and what to do."""
    (tmp_path / "run.toml").write_text("name = ")
    with pytest.raises(ConflictError, match=r"run.toml is not valid TOML.*name another folder with --out"):
        RunDirectory(tmp_path).check(FILE)


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    """A full disk ended the third one; the next goes where it was."""
    directory = RunDirectory(tmp_path)
    directory.begin(FILE)
    for number in (1, 2):
        directory.add_round({"round": number})
    with open(tmp_path / "rounds.jsonl", "ab") as file:
        file.write(b'{"round": 3, "acc')
    assert RunDirectory(tmp_path).rounds() == [{"round": 1}, {"round": 2}]
    directory.add_round({"round": 3})
    assert RunDirectory(tmp_path).rounds() == [{"round": 1}, {"round": 2}, {"round": 3}]
