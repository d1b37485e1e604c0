"""The devices that are enrolled, with their secrets and labels (table `device`)."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from coordinator.store.base import Devices
from coordinator.store.database import Database
from coordinator.store.row_codec import to_column
from coordinator.store.rows import DeviceRow
from edge_client.errors import ConflictError, NoSuchNameError

__all__ = ["DeviceTable"]


class DeviceTable(Devices):
    """`Devices` in the table `device`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> list[DeviceRow]:
        return self._database.all(DeviceRow, "SELECT * FROM device ORDER BY name")

    def get(self, name: str) -> DeviceRow | None:
        return self._database.first(DeviceRow, "SELECT * FROM device WHERE name = ?", name)

    def add(self, *devices: DeviceRow, replace: bool = False) -> None:
        with self._database.transaction("device") as transaction:
            for device in devices:
                if replace:
                    transaction.execute("DELETE FROM device WHERE name = ?", device.name)
                try:
                    transaction.insert("device", device)
                except sqlite3.IntegrityError:
                    raise ConflictError(f"device {device.name!r} exists already; choose another name") from None

    def set_labels(self, name: str, labels: Mapping[str, str]) -> None:
        with self._database.transaction("device") as transaction:
            if not transaction.execute("UPDATE device SET labels = ? WHERE name = ?", to_column(labels), name):
                raise self._unknown(name)

    def remove(self, name: str) -> None:
        with self._database.transaction("device") as transaction:
            transaction.execute("DELETE FROM deployment WHERE device = ?", name)
            if not transaction.execute("DELETE FROM device WHERE name = ?", name):
                raise self._unknown(name)

    def _unknown(self, name: str) -> NoSuchNameError:
        return NoSuchNameError.of("device", name, [device.name for device in self.all()])
