"""Reads device.toml, checks it against this machine, and shows it with all defaults.

Covers: names, paths, the hashes of tasks. Does not cover: the schema (`config.device_file`), what is in the data
(`data.sources`). Loads neither torch nor numpy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_client import durable
from edge_client.config.device_file import DeviceFile, load_device_file
from edge_client.config.task_files import task_sha256
from edge_client.data import registry as data
from edge_client.errors import InputError, MachineError, NoSuchNameError
from edge_client.records import to_map

__all__ = ["load", "paths", "task_hashes", "to_json", "to_toml"]

Json = dict[str, Any]

_FREE_KEYS = ("rename", "labels", "tasks")  # tables whose keys the owner chooses, underscores included


def load(path: Path) -> DeviceFile:
    """Read and check a device file, its paths included; raises `InputError` that names every key that is wrong."""
    if not durable.is_there(path):
        raise InputError(
            f"{path} is missing: it says where this device's data is, for example\n"
            '  data = { source = "npz", train = "/data/train.npz" }\n'
            "  (edge-client join FILE --data DIR writes it)"
        )
    device = load_device_file(path)
    try:
        if device.data is not None and (device.data.source or not device.tasks):
            data.validate(device.data)
        elif device.data is not None:
            data.validate_part(device.data)
    except (NoSuchNameError, InputError) as error:
        raise InputError(f"{path}: {error}") from None
    problems = [f"{key}: {problem}" for key, place in paths(device) if (problem := _problem(place))]
    if problems:
        raise InputError(f"{path}: {'; '.join(problems)}")
    return device


def _problem(place: Path) -> str:
    try:
        return "" if durable.is_there(place) else f"{place} does not exist on this device"
    except MachineError as error:
        return str(error)


def paths(device: DeviceFile) -> Iterator[tuple[str, Path]]:
    """All paths in the file that must exist; data that only a task reads counts if its path is absolute."""
    if device.data is not None:
        section = data.located(device.data)
        for key, place in (("train", section.train), ("test", section.test)):
            if place.startswith("/") or (place and section.source):
                yield f"data.{key}", Path(place)
        partition = data.parse_partition(section.partition)
        if partition.kind == "file":
            yield "data.partition", Path(partition.name)
    for name, place in device.tasks.items():
        yield f"tasks.{name}", _file_of(place)


def _file_of(task: str) -> Path:
    """`/path/FILE.py:OBJECT` without the object; `load_device_file` has checked the form."""
    return Path(task.rpartition(":")[0])


def task_hashes(device: DeviceFile) -> dict[str, str]:
    """SHA-256 of each task's file: what the coordinator compares before a run."""
    return {name: task_sha256(_file_of(place)) for name, place in device.tasks.items()}


def to_json(device: DeviceFile) -> Json:
    """All keys with their values, as they stand in the file; `limits.memory` without a limit is `auto`."""
    return {name: _table(name, section) for name, section in to_map(device).items() if section is not None}


def _table(name: str, section: Mapping[str, Any]) -> Json:
    if name in _FREE_KEYS:
        return dict(section)
    return {key.replace("_", "-"): "auto" if value is None else value for key, value in section.items()}


def to_toml(device: DeviceFile) -> str:
    """The whole file as TOML, with the hashes of tasks as comments; reading it gives the same device again."""
    hashes = task_hashes(device)
    blocks = []
    for section, table in to_json(device).items():
        lines = [f"{_toml_key(key)} = {_toml(value)}" for key, value in table.items()]
        if section == "tasks":
            lines = [f"{line}  # sha256 {hashes[name]}" for line, name in zip(lines, table, strict=True)]
        blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: object) -> str:
    """A value as TOML: for values of a device file that is JSON, except for DEL, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
