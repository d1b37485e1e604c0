"""Calls systemd: its commands, and a command under the sandbox of a unit.

Covers: whether systemd runs here, `systemctl` and `systemd-run`. Does not cover: what is in a unit (`service_unit`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from edge_client.errors import MachineError

__all__ = ["SETUP_FAILURES", "Systemd"]

_TIMEOUT_S = 900.0
# exit codes of a unit whose sandbox could not be set up, and the directive that each is about (systemd.exec)
SETUP_FAILURES = {
    203: "ExecStart",
    216: "SupplementaryGroups",
    217: "User",
    218: "CapabilityBoundingSet",
    226: "BindReadOnlyPaths",
    228: "SystemCallFilter",
    238: "StateDirectory",
    239: "CacheDirectory",
}


class Systemd:
    """The system below a root: `/`, or for tests another one."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def unit_path(self, name: str) -> Path:
        """The path of a unit that an administrator installed."""
        return self.root / "etc/systemd/system" / f"{name}.service"

    def unit_text(self, name: str) -> str | None:
        """The unit with what `systemctl edit` added to it; None if there is none."""
        path = self.unit_path(name)
        if not path.exists():
            return None
        added = sorted((path.parent / f"{path.name}.d").glob("*.conf"))
        try:
            return "\n".join(file.read_text(encoding="utf-8") for file in (path, *added))
        except OSError as error:
            raise MachineError(f"cannot read {error.filename}: {error.strerror}") from error

    def inside(self, path: Path) -> Path:
        """The path inside of that system."""
        absolute = Path(os.path.abspath(path))
        return Path("/") / absolute.relative_to(self.root) if absolute.is_relative_to(self.root) else absolute

    def require(self) -> None:
        """Raise `MachineError` unless systemd runs this system."""
        runs = (self.root / "run/systemd/system").is_dir()
        lacking = [word for word in ("systemctl", "systemd-run") if shutil.which(word) is None]
        if not runs or lacking:
            folder = self.root / "run/systemd/system"
            why = f"{' and '.join(lacking)} not found" if lacking else f"{folder} is not there"
            raise MachineError(
                f"systemd does not run this system ({why}); nothing was changed: start it in the foreground, or from "
                "what starts programs here"
            )

    def call(self, *words: str) -> None:
        """Run `systemctl WORDS`; raises `MachineError` with its output."""
        self.do("systemctl", *words)

    def do(self, *words: str) -> None:
        """Run a command of the system that must succeed; raises `MachineError` with its output."""
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MachineError(f"cannot run {' '.join(words)}: {error}") from error
        if done.returncode != 0:
            output = " ".join((done.stderr or done.stdout).split())[:500] or "it said nothing"
            raise MachineError(f"{' '.join(words)} ended with exit code {done.returncode}: {output}")

    def run_under(
        self, properties: Sequence[tuple[str, str]], command: Sequence[str]
    ) -> subprocess.CompletedProcess[str]:
        """A command with these properties of a service, and what it said; `SETUP_FAILURES` tells of some exit codes."""
        words = ["systemd-run", "--quiet", "--wait", "--collect", "--pipe"]
        words += [f"--property={key}={value.replace('%%', '%')}" for key, value in properties]
        try:
            return subprocess.run(
                [*words, "--", *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MachineError(f"cannot run {words[0]}: {error}") from error
