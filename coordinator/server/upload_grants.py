"""Asking devices for their updates, as long as the disk has room for them."""

from __future__ import annotations

import logging
from pathlib import Path

from coordinator.fleet.uploads import Uploads
from coordinator.server.outbox import Outbox
from edge_client import durable

__all__ = ["UploadGrants"]

log = logging.getLogger(__name__)


class UploadGrants:
    """Grants uploads while more than the reserve stays free, also when all that was granted has arrived."""

    def __init__(self, uploads: Uploads, outbox: Outbox, *, folder: Path, reserve_bytes: int) -> None:
        """`folder` is on the disk that takes the updates."""
        self._uploads = uploads
        self._outbox = outbox
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self.paused = ""  # why no update is asked for; empty while they are

    def grant(self, now: float) -> None:
        """Ask for what is due, unless the disk is nearly full."""
        with durable.disk_errors(f"cannot look at {self._folder}"):
            free_bytes = durable.free_bytes(self._folder) - self._uploads.outstanding_bytes
        is_low = free_bytes < self._reserve_bytes
        if is_low != bool(self.paused):
            self.paused = "disk: less than the reserve is free, no update is asked for" if is_low else ""
            log.warning(self.paused or "there is space on the disk again")
        if not is_low:
            for device, grant in self._uploads.grants(now):
                self._outbox.send(device, grant)
