"""Collects the status of a daemon from its parts: for `status.json`, and in one line for systemd.

Covers: collecting it. Does not cover: the file, and the text made from it (`status`).
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from edge_client import __version__
from edge_client.client.connection_log import ConnectionLog
from edge_client.client.session import Session
from edge_client.client.status import Moment, Status, StatusFile, one_line_status
from edge_client.client.worker_control import WorkerControl
from edge_client.wire.messages import Assign, Receipt

__all__ = ["LastMoments", "StatusReport"]


class LastMoments:
    """The last receipt and the last error."""

    def __init__(self) -> None:
        self.receipt: Moment | None = None
        self.error: Moment | None = None

    def note_error(self, text: str) -> None:
        """Keep the text of an error."""
        self.error = _moment(text)

    def note_receipt(self, receipt: Receipt, assign: Assign | None) -> None:
        """Keep the answer to an update; `assign` is the current lease, receipts of other leases are late."""
        if assign is not None and assign.lease == receipt.lease:
            reason = f" ({receipt.code}: {receipt.detail})" if receipt.status != "accepted" else ""
            self.receipt = _moment(f"run {assign.run}, round {assign.round}: {receipt.status}{reason}")


def _moment(text: str) -> Moment:
    return Moment(text=text[:2000], at_s=time.time())


class StatusReport:
    """Writes the status of one daemon."""

    def __init__(
        self, path: Path, *, session: Session, connection: ConnectionLog, worker: WorkerControl, moments: LastMoments
    ) -> None:
        self._file = StatusFile(path)
        self._session = session
        self._connection = connection
        self._worker = worker
        self._moments = moments

    def is_due(self, now: float) -> bool:
        """Whether it may be time to write; `write` finds out whether anything has changed."""
        return now >= self._file.due

    def write(self, now: float) -> str:
        """Write the file if that is due; returns the status in one line."""
        status = self.status()
        self._file.update(status, now)
        return one_line_status(status)

    def write_stopped(self, now: float) -> None:
        """The daemon ends."""
        self._file.update(replace(self.status(), link="stopped"), now)

    def status(self) -> Status:
        """Collect the current status."""
        session, assign, progress = self._session, self._session.assign, self._session.progress
        return Status(
            pid=os.getpid(),
            client=__version__,
            budget_bytes=self._worker.budget_bytes,
            plan=self._worker.plan,
            link=self._connection.state(is_online=session.online),
            state=session.state,
            lease=assign.lease if assign else "",
            run=assign.run if assign else "",
            round=assign.round if assign else 0,
            num_rounds=assign.num_rounds if assign else 0,
            phase=progress.phase,
            step=progress.step,
            total=progress.total,
            loss=progress.loss,
            receipt=self._moments.receipt,
            error=self._moments.error,
        )
