"""Bytes that travel between the coordinator and its devices for the open run, until they are stored. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["TrafficMeter"]


class TrafficMeter:
    """Bytes by device, up from the device and down to it, since they were last stored."""

    def __init__(self) -> None:
        self._moved: dict[str, tuple[int, int]] = {}

    @property
    def moved(self) -> Mapping[str, tuple[int, int]]:
        """Device -> bytes up and bytes down; devices that moved nothing are missing."""
        return self._moved

    def count(self, device: str, *, up: int = 0, down: int = 0) -> None:
        """Add the bytes of a message, as published."""
        before = self._moved.get(device, (0, 0))
        self._moved[device] = (before[0] + up, before[1] + down)

    def take(self, device: str) -> dict[str, tuple[int, int]]:
        """Return what one device moved, and count it from zero again."""
        return {device: self._moved.pop(device)} if device in self._moved else {}

    def take_all(self) -> dict[str, tuple[int, int]]:
        """Return what all devices moved, and count from zero again."""
        moved, self._moved = self._moved, {}
        return moved
