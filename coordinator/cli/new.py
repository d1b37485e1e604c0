"""`coordinator new`: a run file that trains well as it stands, made for the data that it is shown.

With `--all`, every key stands in it, and beside it an example of a device's file and a task that works unchanged. A key
that a person may want to decide on is live; every other one stands behind a `#` with its default, so that taking the
`#` away changes nothing until the value is changed. Where there is no default, an example stands there.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.run_check import check_run
from edge_client import durable
from edge_client.config.device_file import DeviceFile
from edge_client.config.key_descriptions import DescribedKey, describe
from edge_client.config.quantities import parse_bytes, parse_duration
from edge_client.config.recommended import TRAINING
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.config.toml_text import toml_value
from edge_client.errors import ConflictError, InputError
from edge_client.models import registry as models
from edge_client.records import is_id

__all__ = ["PATIENCE", "NewOptions", "make_folder"]

_WIDTH = 118
_HELP_COLUMN = 36
_NO_DEFAULT: Mapping[str, object] = {  # key -> an example, for keys that do nothing unless they are set
    "train.max-steps": 100,
    "stop.target": 0.95,
    "stop.patience": 15,
    "stop.hours": 12,
    "devices.where": ["line=a"],
    "labels": {"line": "a"},
}
PATIENCE = 5  # evaluations
_SHORT_HEAD = """\
What to train. Change what you like, then: coordinator run start {folder}/run.toml
Every key there is: coordinator new DIR --all, or docs/reference/files.md
"""
_BRIEF: Mapping[str, str] = {  # instead of the long explanations, where only the live keys are written
    "train.epochs": 'passes over the data per round; "auto": about 50 steps',
    "train.warm-up": "the learning rate rises step by step in the first round",
    "train.normalise": "inputs get mean 0 and deviation 1, by sums of all devices' samples",
    "stop.patience": "end when so many evaluations in a row brought no better value",
    "stop.rounds": "rounds to train at most",
    "devices.min": "a round starts with at least so many devices",
}
_UNITS = {
    "duration": ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")),
    "size": ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"), (1, "B")),
}
_RUN_HEAD = """\
What to train. Check it and start it: coordinator run start {folder}/run.toml
A key behind a # has the value that is shown; take the # away to change it. Sizes are written as 512MB or 1.5GiB,
durations as 90s, 30min or 2h.
"""
_TASK_HINT = """\
What the devices train is a built-in model (section [model] below), or a task: model and data as Python functions of
your own, such as those in {name}.py. For the task remove [model] with its keys and take the # away from one of these
lines; every device needs the file, and the line `tasks` in its device.toml:
"""
_DEVICE_HEAD = """\
An example of a device's own file: its data and its limits; no run can widen it. On the device it is
/var/lib/fedfit/device/device.toml, or where the --config of edge-client says.
A key behind a # has the value that is shown, or the example, if it has none.
"""
_TASK = '''\
"""A task: a model and its data. The same file on every device and on the server: its SHA-256 is compared."""

from torch import nn

from edge_client import Task, image_folder

SIZE = {size}  # pixels; every image is resized to SIZE x SIZE


def model(num_classes):
    """What is trained; called on the server and on the devices, never sees data."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d({channels}, 16, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes)),
    )


def train_data(device):
    """Runs on a device only; `device.data` is the table `data` of its device.toml."""
    return image_folder(device.data["train"], size=SIZE{grey})


def test_data(device):
    """The device's own test data; it never leaves the device."""
    return image_folder(device.data["test"], size=SIZE{grey})


task = Task(model=model, train_data=train_data, test_data=test_data, input=({channels}, SIZE, SIZE))
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOptions:
    """The options of `coordinator new`."""

    folder: Path
    classes: tuple[str, ...] = ("ok", "scratch", "dent")
    model: str = "small-cnn"
    input: tuple[int, ...] = (3, 96, 96)
    rounds: int = 10
    every_key: bool = False  # and the examples of a device's file and of a task


def make_folder(options: NewOptions) -> list[Path]:
    """Write the files, all or none; raises `ConflictError` if one is there already, `InputError` for a bad value."""
    name = options.folder.resolve().name
    if not is_id(name):
        raise InputError(f"the folder's name {name!r} names the run: expected 1 to 64 letters, digits, '-' or '_'")
    texts = {"run.toml": _run_file(name, options)}
    if options.every_key:
        texts = {f"{name}.py": _task(options), "device.toml": _device_file(name, options), **texts}
    wanted = [options.folder / file for file in texts]
    for path in reversed(wanted):
        if path.exists():
            raise ConflictError(f"{path} exists already; name another folder, or edit what is there")
    written: list[Path] = []
    with durable.disk_errors(f"cannot write to {options.folder}"):
        options.folder.mkdir(parents=True, exist_ok=True)
        try:
            for path, text in zip(wanted, texts.values(), strict=True):
                durable.write_bytes(path, text.encode(), point="new.file", mode=0o644)
                written.append(path)
        except OSError:
            for path in written:
                path.unlink(missing_ok=True)
            raise
    return wanted[::-1]


def _task(options: NewOptions) -> str:
    """The example reads square images, of the run's size if that is one."""
    shape = options.input
    images = len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2]
    channels, size = (shape[0], shape[1]) if images else (3, 96)
    return _TASK.format(channels=channels, size=size, grey="" if channels == 3 else ", channels=1")


def _run_file(name: str, options: NewOptions) -> str:
    section = {"name": options.model, "input": list(options.input)}
    stop = {"rounds": options.rounds, "patience": PATIENCE}
    live: dict[str, object] = {"name": name, "classes": list(options.classes)}
    check_run(
        parse_table(
            RunFile, {**live, "model": section, "train": dict(TRAINING), "stop": stop}, source="coordinator new"
        )
    )
    live |= {f"model.{key}": value for key, value in section.items()}
    live |= {f"train.{key}": value for key, value in TRAINING.items()}
    live |= {f"stop.{key}": value for key, value in stop.items()} | {"devices.min": 1}
    rows = [row for row in describe(RunFile) if not row.key.startswith("task")]
    if not options.every_key:
        rows = [row._replace(help=_BRIEF.get(row.key) or re.split("[;:(]", row.help)[0], range="") for row in rows]
        wanted = [row for row in rows if row.key in live or any(key.startswith(f"{row.key}.") for key in live)]
        lines = [
            *_comment(_SHORT_HEAD.format(folder=options.folder)),
            "",
            *_file_lines(wanted, live, extra={"model": []}),
        ]
        return _text(lines)
    extra = {"model": describe(models.options_type(options.model), "model.")}
    hint = [*_comment(_TASK_HINT.format(name=name)), f"# task = {toml_value(name)}", *_task_keys(name), ""]
    lines = [*_comment(_RUN_HEAD.format(folder=options.folder)), "", *_file_lines(rows, live, extra=extra, hint=hint)]
    return _text(lines)


def _task_keys(name: str) -> Iterator[str]:
    """The longer way to write a task; its hash is filled in by the server."""
    helps = {row.key.removeprefix("task."): row.help for row in describe(RunFile) if row.key.startswith("task.")}
    keys = {"name": name, "file": f"{name}.py:task", "init": "random"}
    yield f"# task = {toml_value(keys)}"
    for key in [key for key in helps if key != "name"]:
        yield from textwrap.wrap(f"{key}: {helps[key]}", _WIDTH, initial_indent="#     ", subsequent_indent="#       ")


def _device_file(name: str, options: NewOptions) -> str:
    data = {"source": "image-folder", "train": f"/data/{name}/train", "test": f"/data/{name}/test"}
    live: dict[str, object] = {f"data.{key}": value for key, value in data.items()}
    examples = {
        "rename": {"kratzer": options.classes[1 % len(options.classes)]},
        "tasks": {name: f"/opt/fedfit/tasks/{name}.py:task"},
    }
    return _text([*_comment(_DEVICE_HEAD), "", *_file_lines(describe(DeviceFile), live, examples=examples)])


def _text(lines: Sequence[str]) -> str:
    try:
        text = "\n".join(lines).rstrip() + "\n"
        text.encode()
    except UnicodeEncodeError:
        raise InputError("--classes: expected text in UTF-8") from None
    return text


def _file_lines(
    rows: Sequence[DescribedKey],
    live: Mapping[str, object],
    *,
    examples: Mapping[str, object] | None = None,
    extra: Mapping[str, Sequence[DescribedKey]] | None = None,
    hint: Sequence[str] = (),
) -> Iterator[str]:
    """Keys outside of tables first, as TOML wants it, then the tables in their order."""
    examples = {**_NO_DEFAULT, **(examples or {})}
    for row in rows:
        if "." not in row.key and row.type != "table":
            yield from _key_lines(row, live, examples)
    yield ""
    yield from hint
    for table in [row for row in rows if row.type == "table"]:
        yield f"[{table.key}]".ljust(_HELP_COLUMN) + f"# {table.help.removesuffix(', or')}"
        inside = [row for row in rows if row.key.startswith(f"{table.key}.")]
        for row in [row for row in inside if not row.key.endswith("*")]:
            yield from _key_lines(row, live, examples)
        extra_rows = (extra or {}).get(table.key)
        for row in extra_rows or ():
            yield from _key_lines(row, live, examples)
        if extra_rows is None:
            yield from _comment("\n".join(row.help for row in inside if row.key.endswith("*")))
        yield ""


def _key_lines(row: DescribedKey, live: Mapping[str, object], examples: Mapping[str, object]) -> Iterator[str]:
    """`# lr = 0.05    # learning rate; 0 to 1000`, over several lines if it is long."""
    key, text = row.key.rpartition(".")[2], row.help
    if row.key in live:
        head = f"{key} = {toml_value(live[row.key])}"
    elif row.key in examples:
        head, text = f"# {key} = {toml_value(examples[row.key])}", f"{text}; no default, this is an example"
    else:
        head = f"# {key} = {_default(row)}"
    text = "; ".join(filter(None, (text, _range(row))))
    lines = textwrap.wrap(text, _WIDTH - _HELP_COLUMN - 2, break_on_hyphens=False)
    fits = len(head) < _HELP_COLUMN
    yield head.ljust(_HELP_COLUMN) + f"# {lines[0]}" if fits else head
    yield from (f"#{' ' * (_HELP_COLUMN + 1)}{line}" for line in lines[1 if fits else 0 :])


def _default(row: DescribedKey) -> str:
    """A key's default as TOML; sizes and durations in the largest unit that is exact."""
    shown = row.default.strip("`")
    if not shown and row.type == "size":
        return '"auto"'
    if row.type in _UNITS:
        number = parse_bytes(shown) if row.type == "size" else parse_duration(shown)
        unit, word = next((unit, word) for unit, word in _UNITS[row.type] if number % unit == 0)
        return toml_value(f"{number / unit:.15g}{word}")
    if not shown and row.type == "text":
        return '""'
    if not shown and row.type.startswith("list"):
        return "[]"
    if not shown and row.type.startswith("table"):
        return "{}"
    return shown


def _range(row: DescribedKey) -> str:
    """A range for people: the help describes what a text may be, except for choices that it does not name."""
    if row.type != "text":
        return "" if row.range == "0 or more" or "`" in row.range else row.range
    words = re.findall(r"[a-z0-9-]+", row.range.replace(" or ", " "))
    is_choice = re.fullmatch(r"`[a-z0-9|-]+`( or `[a-z0-9|-]+`)*", row.range)
    return " or ".join(words) if is_choice and not all(word in row.help for word in words) else ""


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in text.splitlines()]
