"""Which devices have changed since somebody last looked. No I/O, no clock.

Whoever changes what is known of a device notes its name, which costs one entry in a set; whoever shows devices takes
the names and looks at these alone, instead of at the whole fleet.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ChangedDevices"]


class ChangedDevices:
    """The names of the devices that have changed; for one thread."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._all = True  # nobody has looked yet

    def note(self, name: str) -> None:
        """Something about a device has changed."""
        self._names.add(name)

    def note_each(self, names: Iterable[str]) -> None:
        """Something about each of these devices has changed."""
        self._names.update(names)

    def note_all(self) -> None:
        """Something that concerns every device has changed."""
        self._all = True

    @property
    def may_be_all(self) -> bool:
        """Whether something that concerns every device has changed since somebody last looked."""
        return self._all

    def take(self) -> set[str] | None:
        """The devices that have changed since the last call; None: perhaps all of them."""
        names, everything = self._names, self._all
        self._names, self._all = set(), False
        return None if everything else names
