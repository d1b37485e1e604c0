"""The task of a run file, as it lies beside the file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from rows import run_file

from coordinator.aggregation.task_source import task_place, with_task
from edge_client.config.run_file import TaskSection
from edge_client.errors import InputError

SOURCE = "mine = None\n"
SHA256 = hashlib.sha256(SOURCE.encode()).hexdigest()
RUN = run_file(model=None, task={"name": "t"})


def test_a_task_is_read_beside_its_run_file_and_hashed(tmp_path: Path) -> None:
    """The run gets the hash of the source, and the file's name without its folder."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "nets.py").write_text(SOURCE)
    read = with_task(RUN, TaskSection(name="t", file="tasks/nets.py:mine"), tmp_path / "run.toml")
    assert (read.source, read.place) == (SOURCE, f"{tmp_path}/tasks/nets.py:mine")
    assert read.file.task == TaskSection(name="t", file="nets.py:mine", sha256=SHA256)
    assert task_place(read.file) == (Path("nets.py"), "mine")


def test_without_a_file_a_task_is_called_as_its_name(tmp_path: Path) -> None:
    """`t.py`, and in it `task`."""
    (tmp_path / "t.py").write_text(SOURCE)
    assert with_task(RUN, TaskSection(name="t"), tmp_path / "run.toml").place == f"{tmp_path}/t.py:task"


@pytest.mark.parametrize(
    ("content", "sha256", "message"),
    [
        (None, "", "task 't': .* names another place"),
        (b"\xff", "", r"t\.py: expected Python in UTF-8"),
        (SOURCE.encode(), "0" * 64, rf"task\.sha256 is {'0' * 64}, but .*t\.py has {SHA256}"),
    ],
    ids=["missing", "binary", "another"],
)
def test_a_source_that_is_not_the_runs_is_refused(
    tmp_path: Path, content: bytes | None, sha256: str, message: str
) -> None:
    """No file, no text, another text than the hash is of."""
    if content is not None:
        (tmp_path / "t.py").write_bytes(content)
    with pytest.raises(InputError, match=message):
        with_task(RUN, TaskSection(name="t", sha256=sha256), tmp_path / "run.toml")
