"""Devices that are not at hand: one TOML file per device model, with a source for every figure.

They ship with the package (`profiles/` of the repository). A file of one's own in the same form is named by its path.
Does not cover: this machine (`probe`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from edge_client.config.tables import Bytes, parse_table
from edge_client.device.probe import Memory
from edge_client.errors import InputError, NoSuchNameError
from edge_client.records import Between, Matches, Positive

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["KnownDevice", "known_names", "load_known"]

_FOLDER = Path(__file__).parents[1] / "_profiles"
_FIGURES = ("memory", "reserve", "cores", "accelerator", "bandwidth")
_LONGEST_BYTES = 65_536

Line = Annotated[str, Matches(r"[^\x00-\x1f\x7f]{0,300}")]


def _key(help_text: str, **default: Any) -> Any:
    return field(metadata={"help": help_text}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice:
    """A device model, as one file of `profiles/` describes it."""

    name: Annotated[str, Matches(r"[^\x00-\x1f\x7f]{1,100}")] = _key("the model, as people call it")
    kind: Annotated[str, Matches(r"jetson|raspberry-pi|gpu-host|container|host")] = _key("what sort of device it is")
    memory: Annotated[Bytes, Between(1, 2**53)] = _key("MemTotal, such as 7.99GB: what Linux has of the chips' memory")
    reserve: Bytes = _key("what system and services usually hold of it: MemAvailable is memory less this")
    cores: Annotated[Positive, Between(1, 65536)] = _key("CPU cores")
    accelerator: Line = _key("GPU; empty: none that torch can use", default="")
    gpu_memory: Annotated[str, Matches(r"none|unified|separate")] = _key("whose memory the GPU uses", default="none")
    bandwidth: Annotated[float, Between(0.001, 100_000)] | None = _key("of the memory, in GB/s", default=None)
    note: Line = _key("what else its owner should know", default="")
    measured: Line = _key("who measured the figures on such a device; empty: nobody yet", default="")
    sources: Mapping[str, Line] = _key("where each figure is from, by its key")

    def typical_memory(self) -> Memory:
        """The memory that such a device usually has."""
        return Memory(total_bytes=self.memory, available_bytes=self.memory - self.reserve)


def known_names() -> list[str]:
    """All models that ship with fedfit."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_known(name: str) -> KnownDevice:
    """A model by its name, or by the path of a file of one's own; raises `NoSuchNameError`, `InputError`."""
    if name.endswith(".toml") or "/" in name:
        return _load(Path(name))
    known = known_names()
    if name not in known:
        raise NoSuchNameError.of("profile", name, known)
    return _load(_FOLDER / f"{name}.toml")


def _load(path: Path) -> KnownDevice:
    try:
        with open(path, "rb") as file:
            text = file.read(_LONGEST_BYTES).decode()
        table = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    try:
        device = parse_table(KnownDevice, table, source=str(path))
    except InputError as error:
        raise _with_line(str(error), path, text) from None
    for key, problem in _problems(device):
        raise _with_line(f"{path}: {key}: {problem}", path, text)
    return device


def _problems(device: KnownDevice) -> Iterator[tuple[str, str]]:
    """What no single key can tell."""
    if device.reserve >= device.memory:
        yield "reserve", f"expected less than memory ({device.memory}), got {device.reserve}"
    if (device.gpu_memory == "none") != (not device.accelerator):
        yield "gpu-memory", f"expected none exactly without an accelerator, got {device.gpu_memory!r}"
    figures = [figure for figure in _FIGURES if getattr(device, figure) not in ("", None)]
    for figure in figures:
        if not device.sources.get(figure):
            yield "sources", f"expected a source for {figure}, got none"
    for key in device.sources:
        if key not in figures:
            yield f"sources.{key}", f"expected one of the figures that the file gives ({', '.join(figures)})"


def _with_line(message: str, path: Path, text: str) -> InputError:
    """The same error with the line of the key that it begins with, if the file has one."""
    rest = message.removeprefix(f"{path}: ")
    for number, place in _places(text):
        if re.match(rf"(unknown key )?'?{re.escape(place)}(?![\w.-])", rest):
            return InputError(f"{path}, line {number}: {rest}")
    return InputError(message)


def _places(text: str) -> Iterator[tuple[int, str]]:
    """(line, `table.key`) of each key and each table."""
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([\w.-]+)\]", line):
            table = f"{header[1]}."
            yield number, header[1]
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            yield number, table + key[1]
