"""The files of a system below a root directory: `/` for this machine, or a recorded copy of another one.

A file that is missing is an answer (None); one that cannot be read is one as well, with a note for people. Nothing is
ever read outside of the root: a link that leads out of it counts as missing.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from edge_client.errors import InputError

__all__ = ["Tree", "printable"]

_LONGEST_BYTES = 1 << 20
_LONGEST_LINE = 160
_MISSING = (FileNotFoundError, NotADirectoryError)


def printable(text: str, limit: int = _LONGEST_LINE) -> str:
    """One line without control characters: texts of firmware and file names reach terminals and the wire."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:limit]


class Tree:
    """Reads files by their absolute path; `notes` collects what a person should know about them."""

    def __init__(self, root: Path = Path("/")) -> None:
        if not os.path.isdir(root):
            raise InputError(f"expected a directory that holds /proc, /sys and /etc of a system, got {str(root)!r}")
        self._root = os.path.realpath(root)
        self.notes: list[str] = []

    @property
    def is_this_machine(self) -> bool:
        """Whether it is the running system, and not a copy."""
        return self._root == "/"

    def place(self, path: str) -> str:
        """Where a path of that system is on this one, for messages."""
        return path if self.is_this_machine else self._root + path

    def text(self, path: str) -> str | None:
        """What a file says, without the NUL that ends texts of the firmware; None if there is nothing to read."""
        real = self._inside(path)
        if real is None:
            return None
        try:
            return _read(real).decode(errors="replace").rstrip("\0\n")
        except _MISSING:
            return None
        except OSError as error:
            self.notes.append(f"cannot read {printable(self.place(path))}: {error.strerror or error}")
            return None

    def line(self, path: str) -> str:
        """The first line of a file, printable; empty if there is none."""
        text = self.text(path)
        return printable(text.split("\n", 1)[0]) if text else ""

    def number(self, path: str, *, unlimited: str = "") -> int | None:
        """A file that holds one number; None without it, for the word `unlimited`, and, noted, for anything else."""
        text = self.text(path)
        if text is None or text.strip() == unlimited:
            return None
        try:
            return int(text)
        except ValueError:
            self.add_unreadable_note(path, text)
            return None

    def add_unreadable_note(self, path: str, text: str) -> None:
        """Add a note that a file makes no sense and is ignored."""
        self.notes.append(f"{printable(self.place(path))} says {printable(text, 40)!r}, which makes no sense; ignored")

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted."""
        real = self._inside(path)
        if real is None:
            return []
        try:
            return sorted(os.listdir(real))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Whether something is there."""
        real = self._inside(path)
        return real is not None and os.path.exists(real)

    def _inside(self, path: str) -> str | None:
        if "\0" in path:
            return None
        real = os.path.realpath(f"{self._root}/{path}")
        return real if self.is_this_machine or f"{real}/".startswith(f"{self._root}/") else None


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe in a copied tree must not block
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "it is not a file")
        parts: list[bytes] = []
        length = 0
        while length < _LONGEST_BYTES and (part := os.read(fd, 65_536)):  # /proc gives long files in pieces
            parts.append(part)
            length += len(part)
        return b"".join(parts)
    finally:
        os.close(fd)
