"""A user's task file: read once, run as a module of its own, and every mistake in it named with its line."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import edge_client
from edge_client.config.device_file import DataSection
from edge_client.config.task_files import AllowedTasks, split_place, task_sha256
from edge_client.errors import InputError
from edge_client.task.task import Task, data_table, load_task, read_source

ROOT = Path(__file__).parents[4]
GOOD = """\
from __future__ import annotations
from dataclasses import dataclass
from edge_client import Task

@dataclass
class Options:  # annotations are looked up in the module that sys.modules has
    width: int = 3

def model(num_classes): return Options(num_classes)
def data(device): return device.data["train"]
task = Task(model=model, train_data=data, units=["stem", "head"], input=(1, 8, 8))
number = 3
"""


def write(folder: Path, text: str | bytes) -> Path:
    """A task file."""
    path = folder / "mine.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_task_is_loaded_from_its_file_without_torch(tmp_path: Path) -> None:
    """Neither the package nor a task that does not ask for torch loads it; the import path stays as it was."""
    path = write(tmp_path, GOOD)
    code = (
        "import sys; before = list(sys.path); import edge_client; from edge_client.task.task import load_task; "
        f"t = load_task({str(path) + ':task'!r}); "
        "assert t.units == ['stem', 'head'] and t.model(5).width == 5 and sys.path == before; "
        "assert not {'torch', 'numpy', 'mine'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "__pycache__").exists()


def test_the_public_names_are_there_when_asked_for() -> None:
    """`from edge_client import ...` of each; another name is an ordinary AttributeError."""
    assert all(hasattr(edge_client, name) for name in edge_client.__all__)
    assert edge_client.Task is Task
    assert not hasattr(edge_client, "nothing")


def test_the_bytes_that_were_hashed_are_the_bytes_that_run(tmp_path: Path) -> None:
    """The file is replaced between reading and running: what was read runs."""
    path = write(tmp_path, GOOD)
    source = read_source(path)
    path.write_text("raise SystemError('replaced')")
    assert source.sha256 == hashlib.sha256(GOOD.encode()).hexdigest()
    assert isinstance(source.load(), Task)
    assert task_sha256(path) == hashlib.sha256(b"raise SystemError('replaced')").hexdigest()


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        (None, "mine.py:task", "cannot read the task .*mine.py: No such file"),
        ("x = 1\ndef broken(:\n", "mine.py:task", "mine.py, line 2: the task cannot be loaded: SyntaxError: invalid"),
        ("import os\n\n1 / 0\n", "mine.py:task", "mine.py, line 3: .* ZeroDivisionError: division by zero"),
        ("def f():\n    raise KeyError('a\\nb')\nf()", "mine.py:task", r"mine.py, line 2: .* KeyError: 'a\\nb'$"),
        ("import os\nos.listdir('/no/such')", "mine.py:task", "mine.py, line 2: .*FileNotFoundError"),
        ("raise ValueError('one\\n  two')", "mine.py:task", "ValueError: one two$"),
        ("import sys\nsys.exit(4)", "mine.py:task", "mine.py, line 2: .* SystemExit: 4"),
        ("x = '\0'", "mine.py:task", "mine.py.*null bytes"),
        (b"x = '\xff'", "mine.py:task", "mine.py.*SyntaxError"),
        (GOOD, "mine.py:other", "no object 'other'; it has task"),
        ("x = 1", "mine.py:task", r"no object 'task'; write task = Task\(...\) into it"),
        (GOOD, "mine.py:number", "number: expected an edge_client.Task, got int"),
        (GOOD, "mine.txt:task", "expected a task as FILE.py:OBJECT, got"),
        (GOOD, "mine.py:a.b", "expected a task as FILE.py:OBJECT, got"),
        ("x = 1\n" * 200_000, "mine.py:task", "at most 1048576 bytes"),
    ],
)
def test_every_failure_is_an_input_error_of_one_line(
    tmp_path: Path, text: str | bytes | None, place: str, message: str
) -> None:
    """It names the file, the user's own line, and the type and message of what was raised."""
    if text is not None:
        write(tmp_path, text)
    before = {name for name in sys.modules if name.startswith("_fedfit")}
    with pytest.raises(InputError, match=message) as caught:
        load_task(str(tmp_path / place))
    assert "\n" not in str(caught.value)
    if "number" not in place and "other" not in place and "no object" not in message:
        assert {name for name in sys.modules if name.startswith("_fedfit")} == before


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A task must be a plain file."""
    os.mkfifo(tmp_path / "mine.py")
    with pytest.raises(InputError, match="it is no file"):
        task_sha256(tmp_path / "mine.py")


def test_memory_that_ends_in_a_task_is_no_mistake_of_its_code(tmp_path: Path) -> None:
    """The worker has an exit code of its own for it."""
    write(tmp_path, "raise MemoryError()")
    with pytest.raises(MemoryError):
        load_task(str(tmp_path / "mine.py"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "Task: model: expected a function, got None"),
        ({"train_data": "/data"}, "Task: train_data: expected a function, got '/data'"),
        ({"test_data": 3}, "Task: test_data: expected a function"),
        ({"units": "stem"}, "Task: units: expected a list"),
        ({"units": []}, "Task: units: expected a list"),
        ({"input": (3, 0, 96)}, "Task: input: expected a list of whole numbers above 0"),
        ({"input": (3.0, 96)}, "Task: input"),
    ],
)
def test_a_task_checks_its_fields(changes: dict[str, object], message: str) -> None:
    """When it is made, so that the line of the mistake is the user's."""
    with pytest.raises(InputError, match=message):
        Task(**({"model": len, "train_data": len} | changes))  # type: ignore[arg-type]


def test_a_place_is_a_path_and_a_name() -> None:
    """The object is `task` if none is named; a colon in a folder's name is none."""
    assert split_place("/a/b.py:mine") == (Path("/a/b.py"), "mine")
    assert split_place("b.py") == (Path("b.py"), "task")
    assert split_place("/a:b/c.py") == (Path("/a:b/c.py"), "task")


def test_the_data_table_is_text_and_says_what_is_missing() -> None:
    """Keys as device.toml writes them; those that are not set are not there."""
    table = data_table(DataSection(train="/data", test_fraction=0.25))
    assert (table["train"], table["test-fraction"], table["part"]) == ("/data", "0.25", "[0, 1]")
    assert "test" not in table
    with pytest.raises(InputError, match=r"device.data\['test'\], and device.toml has no data.test; add it"):
        table["test"]
    with pytest.raises(InputError, match=r"device.data\['trian'\], and device.toml can only have source, train, test,"):
        table["trian"]


def test_hashes_of_allowed_tasks_are_read_again_and_a_missing_one_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is replaced has its new hash at the next hello; one that comes back and goes again is told again."""
    path = write(tmp_path, "first")
    tasks = AllowedTasks({"mine": f"{path}:task", "gone": f"{tmp_path}/gone.py:task"})
    with caplog.at_level(logging.WARNING):
        assert tasks.hashes() == {"mine": hashlib.sha256(b"first").hexdigest()}
        path.write_text("second")
        assert tasks.hashes() == {"mine": hashlib.sha256(b"second").hexdigest()}
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["task 'gone' is left out"]
    (tmp_path / "gone.py").write_text("")
    assert tasks.hashes().keys() == {"mine", "gone"}
