"""systemd units: the templates that ship with fedfit, and how a machine's values replace theirs.

A template below `deploy/systemd` is a unit that works as it stands; `Unit.with_values` replaces single directives in
it, so that what was analysed is what is installed. Does not cover: putting it in place (`service_install`), running
something under it (`sandbox`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client.device.probe import Memory
from edge_client.device.profile import reserve_bytes
from edge_client.errors import InputError

__all__ = ["Unit", "bound", "command", "hiding", "is_below", "memory_max", "quoted", "state_values", "template"]

_FOLDER = Path(__file__).parents[1] / "_deploy" / "systemd"
_HOMES = ("/home", "/root", "/run/user")
_STATE_ROOT = "/var/lib"
_TEMPORARY = ("/tmp", "/var/tmp")
_CLIENT_BYTES = 96 * 2**20  # the client beside its worker, and what the kernel counts for both
# what is about starting, watching and ending a service, and no part of what it may do
_NOT_SANDBOX = ("Type", "NotifyAccess", "ExecStart", "Restart", "RestartSec", "WatchdogSec", "TimeoutStopSec")
_EMPTY_COUNTS = ("CapabilityBoundingSet", "AmbientCapabilities")  # no capability at all
_NOT_TRANSIENT = ("KillMode", "Delegate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The text of a unit."""

    text: str

    def values(self, key: str) -> list[str]:
        """The values of `key=`, in order."""
        return [value for name, value in self._directives() if name == key]

    def with_values(self, changes: Mapping[str, Sequence[str]]) -> Unit:
        """The same unit with other values: each key's lines are replaced in place; a new one ends [Service]."""
        lines: list[str] = []
        left = dict(changes)
        section = ""
        for line in self.text.splitlines():
            key = line.partition("=")[0]
            if line.startswith("["):
                lines += _before(lines, section, left)
                section = line
            if section == "[Service]" and key in changes:
                lines += [f"{key}={value}" for value in left.pop(key, ())]
            else:
                lines.append(line)
        return Unit(text="\n".join(lines) + "\n")

    def sandbox(self) -> list[tuple[str, str]]:
        """The directives that bound what a process of this unit may do, as `systemd-run --property` takes them.

        An empty value takes back what stands before it (`systemctl edit`), which that command does not understand.
        """
        sandbox: list[tuple[str, str]] = []
        for key, value in self._directives():
            if key in (*_NOT_SANDBOX, *_NOT_TRANSIENT):
                continue
            if not value:
                sandbox = [(name, text) for name, text in sandbox if name != key]
            if value or key in _EMPTY_COUNTS:
                sandbox.append((key, value))
        return sandbox

    def _directives(self) -> Iterator[tuple[str, str]]:
        inside = False
        for line in self.text.splitlines():
            if line.startswith("["):
                inside = line == "[Service]"
            elif inside and re.match(r"[A-Za-z]+=", line):
                key, _, value = line.partition("=")
                yield key, value


def _before(lines: list[str], section: str, left: dict[str, Sequence[str]]) -> list[str]:
    """Insert the directives that [Service] did not have before its last empty line."""
    if section != "[Service]":
        return []
    while lines and not lines[-1]:
        lines.pop()
    return [*(f"{key}={value}" for key in list(left) for value in left.pop(key)), ""]


def template(name: str) -> Unit:
    """A unit that ships with fedfit: fedfit-device, fedfit-device-gpu or fedfit-coordinator."""
    return Unit(text=(_FOLDER / f"{name}.service").read_text(encoding="utf-8"))


def memory_max(memory: Memory | None, limit: int | None) -> str:
    """`MemoryMax` of a device: all but the system's reserve, or what its owner allows a worker and the client."""
    if limit is not None:
        return str(limit + _CLIENT_BYTES)
    return "80%" if memory is None else str(memory.total_bytes - reserve_bytes(memory))


def is_below(path: Path, folder: str) -> bool:
    """Whether `path` is `folder` or lies below it."""
    return Path(folder) == path or Path(folder) in path.parents


def hiding(path: Path) -> str:
    """The directive of fedfit's units that would hide `path`; empty if none does."""
    if any(is_below(path, home) for home in _HOMES):
        return "ProtectHome"
    return "PrivateTmp" if any(is_below(path, place) for place in _TEMPORARY) else ""


def bound(paths: Iterable[Path]) -> list[Path]:
    """What to bind so that these paths are seen: folders, and for a file its folder, because it may be replaced.

    A file that lies directly in `/` or in somebody's home directory is bound alone.
    """
    folders = dict.fromkeys(path if path.is_dir() or _is_private(path.parent) else path.parent for path in paths)
    return [folder for folder in folders if not any(other in folder.parents for other in folders)]


def state_values(state_dir: Path) -> dict[str, list[str]]:
    """systemd makes and guards what is below /var/lib; a state directory elsewhere is made writable."""
    if state_dir.is_relative_to(_STATE_ROOT):
        return {"StateDirectory": [quoted(state_dir.relative_to(_STATE_ROOT))]}
    return {"StateDirectory": [], "StateDirectoryMode": [], "ReadWritePaths": [quoted(state_dir)]}


def _is_private(folder: Path) -> bool:
    roots = (*_HOMES, *_TEMPORARY)
    return folder == Path("/") or str(folder) in roots or str(folder.parent) in ("/home", "/run/user")


def quoted(path: Path, *, optional: bool = False) -> str:
    """A path as a unit's list of paths has it; `optional`: the unit starts without it, and the client says so."""
    text = str(path)
    if not text.isprintable():
        raise InputError(f"expected a path without control characters, got {text!r}; no unit can name it")
    dash, text = "-" if optional else "", text.replace("%", "%%")
    if re.fullmatch(r"[\w./,@+=%-]+", text, re.ASCII):
        return f"{dash}{text}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace(":", "\\\\:")
    return f'"{dash}{escaped}"'


def command(words: Sequence[str]) -> str:
    """A command line for `ExecStart`; systemd reads quotes as a shell does, and has `%` and `$` for itself."""
    return shlex.join(word.replace("%", "%%").replace("$", "$$") for word in words)
