"""What the coordinator remembers about itself: its epoch, its federation, and small settings (table `meta`)."""

from __future__ import annotations

from coordinator.store.base import Settings
from coordinator.store.database import Database

__all__ = ["SettingTable"]


class SettingTable(Settings):
    """`Settings` in the table `meta`; the keys of settings start with `setting.`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def next_epoch(self, wall_s: int) -> int:
        epoch = max(int(self._value("epoch") or 0) + 1, wall_s)
        with self._database.transaction("epoch") as transaction:
            transaction.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", str(epoch))
        return epoch

    def federation(self, fresh: str) -> str:
        federation = self._value("federation")
        if federation is None:
            with self._database.transaction("federation") as transaction:
                transaction.execute("INSERT INTO meta VALUES ('federation', ?)", fresh)
        return federation or fresh

    def get(self, key: str) -> str:
        return self._value(f"setting.{key}") or ""

    def set(self, key: str, value: str) -> None:
        if self.get(key) != value:
            with self._database.transaction("setting") as transaction:
                transaction.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", f"setting.{key}", value)

    def _value(self, key: str) -> str | None:
        rows = self._database.read("SELECT value FROM meta WHERE key = ?", key)
        return rows[0]["value"] if rows else None
