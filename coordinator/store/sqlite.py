"""The store on SQLite: one database, and a class for each group of tables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from coordinator.store.blob_references import BlobReferenceQueries
from coordinator.store.database import Database
from coordinator.store.deployments import DeploymentTable
from coordinator.store.devices import DeviceTable
from coordinator.store.evaluations import EvaluationTable
from coordinator.store.leases import LeaseTable
from coordinator.store.models import ModelTable
from coordinator.store.page_access import PageAccessTables
from coordinator.store.rounds import RoundTable
from coordinator.store.runs import RunTable
from coordinator.store.settings import SettingTable
from coordinator.store.traffic import TrafficTable
from coordinator.store.updates import UpdateTable

__all__ = ["SqliteStore"]


class SqliteStore:
    """Implements `coordinator.store.base.Store`; used by one thread."""

    def __init__(self, path: Path | None = None, *, sync: bool = True, read_only: bool = False) -> None:
        """Open the file `path`, or a store in memory that is gone when it is closed.

        Without `sync` (simulations) a commit survives the end of this process, but not a power cut. `read_only` is for
        looking at a file that another thread or process writes.
        """
        self._database = Database(path, sync=sync, read_only=read_only)
        self.settings = SettingTable(self._database)
        self.devices = DeviceTable(self._database)
        self.runs = RunTable(self._database)
        self.models = ModelTable(self._database)
        self.rounds = RoundTable(self._database)
        self.leases = LeaseTable(self._database)
        self.updates = UpdateTable(self._database)
        self.evaluations = EvaluationTable(self._database)
        self.traffic = TrafficTable(self._database)
        self.deployments = DeploymentTable(self._database)
        self.page_access = PageAccessTables(self._database)
        self.blob_references = BlobReferenceQueries(self._database)

    def turn(self) -> AbstractContextManager[None]:
        """Make one durable transaction of what is written inside, then do what waits for it."""
        return self._database.commits.turn()

    def after_commit(self, action: Callable[[], None]) -> None:
        """Do this once all that was written so far is durable."""
        self._database.commits.after(action)

    def backup(self, path: Path) -> None:
        """Copy everything into a new file, consistently, while the store is in use."""
        self._database.copy_to(path)

    def close(self) -> None:
        """Close the database."""
        self._database.close()
