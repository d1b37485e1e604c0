"""A user's own model and data: `Task`, and reading one from the Python file that its owner named.

    # defects.py: the same file on every device and on the server
    from edge_client import Task, image_folder
    task = Task(model=model, train_data=train_data, test_data=test_data)

Covers: the record, the file and its hash, and what goes wrong in code that is not ours. A file is read once: the bytes
that were hashed are the bytes that run. It runs as a module of its own, under a private name; nothing is looked up on
the import path for it. Only files that a device's owner wrote into device.toml, or that the server's owner gave to a
run, come here: no name and no byte from the network does.
Does not cover: building the model (`run_model`), opening the data (`data.sources`). Needs neither torch nor numpy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.config.device_file import DataSection
from edge_client.config.task_files import read_task_file, split_place
from edge_client.data.registry import located
from edge_client.errors import FedfitError, InputError
from edge_client.user_code import UserCode

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "Device",
    "Source",
    "Task",
    "data_table",
    "load_task",
    "read_source",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device that a task's data functions get data for."""

    name: str
    data: Mapping[str, str]  # the data table of device.toml
    classes: tuple[str, ...]  # of the run
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and its data. The model is made on devices and server, the data only ever in a device's worker.

    `model(num_classes)` returns an `nn.Sequential`, or any module, of which `units` may name the parts in order.
    `train_data(device)` and `test_data(device)` return `image_folder`, `csv` or `npz` of this package, a map-style
    `Dataset`, or a pair of arrays (X, y). Without test data, `data.test-fraction` of the training data is kept for it.
    `input` is the shape of one sample; without it, it is that of the data.
    """

    model: Callable[[int], nn.Module]
    train_data: Callable[[Device], object]
    test_data: Callable[[Device], object] | None = None
    units: Sequence[str] | None = None
    input: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "train_data", "test_data"):
            value = getattr(self, name)
            if not callable(value) and not (name == "test_data" and value is None):
                raise InputError(f"Task: {name}: expected a function, got {value!r:.80}")
        if self.units is not None:
            self._check_list("units", self.units, str, 'such as ["stem", "block1", "head"]')
        if self.input is not None:
            self._check_list("input", self.input, int, "of whole numbers above 0, such as (3, 96, 96)")

    def _check_list(self, name: str, value: object, kind: type, example: str) -> None:
        is_list = isinstance(value, (list, tuple)) and len(value) > 0 and all(type(item) is kind for item in value)
        if not is_list or (kind is int and min(value) < 1):  # type: ignore[call-overload]
            raise InputError(f"Task: {name}: expected a list {example}, got {value!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The bytes of a task's file, read once; or of a method's, which a simulation tries."""

    path: str  # as messages and tracebacks show it
    name: str  # of the object in it
    data: bytes
    what: str = "task"  # for messages

    @property
    def sha256(self) -> str:
        """The hash by which devices and server know that they mean the same task."""
        return hashlib.sha256(self.data).hexdigest()

    def load(self) -> Task:
        """Run the file and take its task; raises `InputError`."""
        module = self._run()
        if not hasattr(module, self.name):
            tasks = [name for name, value in vars(module).items() if isinstance(value, Task)]
            hint = f"it has {', '.join(tasks)}" if tasks else f"write {self.name} = Task(...) into it"
            raise self._lacks_it(hint)
        task = getattr(module, self.name)
        if not isinstance(task, Task):
            raise InputError(f"{self.path}: {self.name}: expected an edge_client.Task, got {type(task).__name__}")
        return task

    def object(self) -> object:
        """Run the file and take what has the name; raises `InputError`."""
        module = self._run()
        if not hasattr(module, self.name):
            raise self._lacks_it(f"it has {', '.join(name for name in vars(module) if name[0] != '_') or 'none'}")
        value: object = getattr(module, self.name)
        return value

    def _lacks_it(self, hint: str) -> InputError:
        return InputError(f"{self.path}: no object {self.name!r}; {hint}")

    def _run(self) -> types.ModuleType:
        name = f"_fedfit_{self.what}_{self.sha256[:16]}"
        module = types.ModuleType(name)
        loader = _ReadOnce(name, self.path)
        loader.data = self.data
        module.__file__, module.__spec__ = self.path, ModuleSpec(name, loader, origin=self.path)
        sys.modules[name] = module  # dataclasses and annotations look their module up there
        try:
            with UserCode(self.path, f"the {self.what} cannot be loaded"):
                loader.exec_module(module)
        except FedfitError:
            del sys.modules[name]
            raise
        return module


class _ReadOnce(SourceFileLoader):
    """Python's own loader on bytes that were read before, without its cache of compiled files."""

    data: bytes

    def get_code(self, fullname: str) -> types.CodeType:
        code: types.CodeType = self.source_to_code(self.data, self.path)
        return code


def read_source(path: Path, name: str = "task", *, shown: str = "", what: str = "task") -> Source:
    """Read a task's file; `shown` is how messages call it, if not by its path."""
    return Source(path=shown or str(path), name=name, data=read_task_file(path, shown=shown, what=what), what=what)


def load_task(place: str) -> Task:
    """The task at `FILE.py:OBJECT`; raises `InputError` for everything that is wrong with it."""
    return read_source(*split_place(place)).load()


def data_table(section: DataSection) -> Mapping[str, str]:
    """`Device.data`: the keys of the data section that are set, as text."""
    table = _DataTable()
    section = located(section)
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if value != "":
            table[field.name.replace("_", "-")] = value if isinstance(value, str) else json.dumps(value)
    return table


class _DataTable(dict[str, str]):
    """A key that device.toml does not have is an error that says so, not a bare `KeyError`."""

    def __missing__(self, key: str) -> str:
        keys = [field.name.replace("_", "-") for field in dataclasses.fields(DataSection)]
        what = f"has no data.{key}; add it" if key in keys else f"can only have {', '.join(keys)} below data"
        raise InputError(f"the task reads device.data[{key!r}], and device.toml {what}")
