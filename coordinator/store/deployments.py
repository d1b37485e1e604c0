"""Which exported model was sent to which device, and what became of it there (table `deployment`)."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.store.base import Deployments
from coordinator.store.database import Database, Transaction
from coordinator.store.rows import DeploymentRow

__all__ = ["DeploymentTable"]


class DeploymentTable(Deployments):
    """`Deployments` in the table `deployment`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def next_issue(self) -> int:
        ((highest,),) = self._database.read("SELECT coalesce(max(issue), 0) FROM deployment")
        return int(highest) + 1

    def add(self, rows: Sequence[DeploymentRow]) -> list[DeploymentRow]:
        devices = {row.device for row in rows}
        superseded = [row for row in self.wanted() if row.device in devices and row.state == "pending"]
        with self._database.transaction("deployment") as transaction:
            _supersede(transaction, superseded)
            for row in rows:
                transaction.insert("deployment", row)
        return superseded

    def all(self, run_id: str | None = None) -> list[DeploymentRow]:
        query = "SELECT * FROM deployment WHERE ?1 IS NULL OR run = ?1 ORDER BY issue, device, id"
        return self._database.all(DeploymentRow, query, run_id)

    def wanted(self) -> list[DeploymentRow]:
        query = "SELECT * FROM deployment WHERE state IN ('pending', 'active') ORDER BY issue, device, id"
        return self._database.all(DeploymentRow, query)

    def set_state(
        self, deployment: str, device: str, state: str, *, code: str = "", detail: str = ""
    ) -> list[DeploymentRow]:
        query = "SELECT * FROM deployment WHERE device = ? AND state = 'active' AND id != ? ORDER BY issue, id"
        superseded = self._database.all(DeploymentRow, query, device, deployment) if state == "active" else []
        with self._database.transaction("deployed") as transaction:
            _supersede(transaction, superseded)
            transaction.execute(
                "UPDATE deployment SET state = ?, code = ?, detail = ? WHERE id = ? AND device = ?",
                *(state, code, detail, deployment, device),
            )
        return superseded


def _supersede(transaction: Transaction, rows: Sequence[DeploymentRow]) -> None:
    keys = [(row.id, row.device) for row in rows]
    transaction.execute_many("UPDATE deployment SET state = 'superseded' WHERE id = ? AND device = ?", keys)
