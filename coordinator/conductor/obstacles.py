"""Which devices a run does not ask, remembered: a fleet is looked at several times a second, and rarely changes.

Covers: the memory, valid as long as a device's session and its labels are the same. Does not cover: the rules
(`rounds.eligibility`).
"""

from __future__ import annotations

from coordinator.fleet.roster import Presence, Roster
from coordinator.rounds.eligibility import Obstacle, obstacle
from coordinator.store.rows import DeviceRow
from edge_client.config.run_file import RunFile

__all__ = ["Obstacles"]


class Obstacles:
    """Why devices do not take part in one run at a time."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._file: RunFile | None = None
        self._known: dict[str, tuple[Presence | None, DeviceRow | None, Obstacle | None]] = {}
        self._seen: tuple[frozenset[str], int] | None = None  # the devices and the revision that `_barred` is for
        self._barred: frozenset[str] = frozenset()

    def of(self, file: RunFile, device: str) -> Obstacle | None:
        """Why a run does not ask a device; None if it may."""
        if file is not self._file:
            self._file, self._seen = file, None
            self._known.clear()
        present, row = self._roster.presence(device), self._roster.row(device)
        known = self._known.get(device)
        if known is not None and known[0] is present and known[1] is row:
            return known[2]
        tasks = present.tasks if present is not None else {}
        answer = obstacle(file, labels=self._roster.labels_of(device), tasks=tasks)
        self._known[device] = (present, row, answer)
        return answer

    def barred(self, file: RunFile, online: frozenset[str]) -> frozenset[str]:
        """Those of the devices `online` that the run does not ask."""
        seen = self._seen
        is_known = file is self._file and seen is not None and seen[0] is online and seen[1] == self._roster.revision
        if not is_known:
            self._barred = frozenset(name for name in online if self.of(file, name) is not None)
            self._seen = (online, self._roster.revision)
        return self._barred
