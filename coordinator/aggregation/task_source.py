"""The task that a run file names: as it lies beside the file, with its hash for the run, and how its model is made."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge_client.config.run_file import RunFile, TaskSection
from edge_client.config.task_files import read_task_file, split_place
from edge_client.errors import InputError

if TYPE_CHECKING:
    from edge_client.task.run_model import Recipe

__all__ = ["RunWithTask", "recipe_of", "task_place", "with_task"]


class RunWithTask(NamedTuple):
    """A run and what it trains."""

    file: RunFile  # with the task's hash
    source: str  # the text of the task's file
    place: str  # FILE.py:OBJECT, absolute


def with_task(file: RunFile, task: TaskSection, path: Path) -> RunWithTask:
    """Find the task of the run file at `path`: the file beside it. Raises `InputError`."""
    try:
        place, name = split_place(task.file or f"{task.name}.py:task")
        found = path.parent / place
        data = read_task_file(found)
        source = data.decode()
    except InputError as error:
        hint = 'task = { name = "NAME", file = "FILE.py:OBJECT" } names another place'
        raise InputError(f"{path}: task {task.name!r}: {error}; {hint}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{found}: expected Python in UTF-8, got {error}") from None
    sha256 = hashlib.sha256(data).hexdigest()
    if task.sha256 not in ("", sha256):
        raise InputError(f"{path}: task.sha256 is {task.sha256}, but {found} has {sha256}")
    section = dataclasses.replace(task, file=f"{found.name}:{name}", sha256=sha256)
    return RunWithTask(dataclasses.replace(file, task=section), source, f"{found.resolve()}:{name}")


def recipe_of(run: RunFile, task: str | None) -> Recipe:
    """How to make the run's model, whose task lies at `task`; its file is called as the run calls it. Loads torch."""
    from edge_client.task.run_model import recipe
    from edge_client.task.task import read_source

    if run.task is None or task is None:
        return recipe(run, None)
    path, name = task_place(run)
    return recipe(run, read_source(Path(task), name, shown=str(path)))


def task_place(run: RunFile) -> tuple[Path, str]:
    """The task's file and object as the run calls them; on the server the file is a blob."""
    assert run.task is not None
    return split_place(run.task.file or f"{run.task.name}.py:task")
