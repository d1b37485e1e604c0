"""The task that a run file names: its source beside the file, its hash for the run, and how its model is built."""

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
    """A run file and the source of its task."""

    file: RunFile  # with the task's hash
    source: str  # the text of the task's file
    place: str  # FILE.py:OBJECT, absolute


def with_task(file: RunFile, task: TaskSection, path: Path) -> RunWithTask:
    """Read the task of the run file at `path`, which lies beside it; raises `InputError`."""
    try:
        place, name = split_place(task.file or f"{task.name}.py:task")
        source_path = path.parent / place
        data = read_task_file(source_path)
        source = data.decode()
    except InputError as error:
        hint = 'task = { name = "NAME", file = "FILE.py:OBJECT" } names another place'
        raise InputError(f"{path}: task {task.name!r}: {error}; {hint}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{source_path}: expected Python in UTF-8, got {error}") from None
    sha256 = hashlib.sha256(data).hexdigest()
    if task.sha256 not in ("", sha256):
        raise InputError(f"{path}: task.sha256 is {task.sha256}, but {source_path} has {sha256}")
    section = dataclasses.replace(task, file=f"{source_path.name}:{name}", sha256=sha256)
    return RunWithTask(dataclasses.replace(file, task=section), source, f"{source_path.resolve()}:{name}")


def recipe_of(run: RunFile, task: str | None) -> Recipe:
    """How to build the model of a run, whose task lies at `task`; errors name its file as the run does. Loads torch."""
    from edge_client.task.run_model import recipe
    from edge_client.task.task import read_source

    if run.task is None or task is None:
        return recipe(run, None)
    path, name = task_place(run)
    return recipe(run, read_source(Path(task), name, shown=str(path)))


def task_place(run: RunFile) -> tuple[Path, str]:
    """The task's file and object by the names in the run file; on the server the file is a blob."""
    assert run.task is not None
    return split_place(run.task.file or f"{run.task.name}.py:task")
