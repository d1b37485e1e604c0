"""Models that devices are to use: who has which, who still waits for one, who may fetch it.

A deployment is recorded before it is said, and said again until the device tells what became of it: at every hello, and
from time to time while the device is there. A client that does not know deployments is never sent one. What a device
says on the way (fetching, testing) is for people, and forgotten with this process.
Covers: deciding, rows, messages. Does not cover: making the files (`cli_deploy`), sending them (`transfers`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from coordinator.roster import Roster
from coordinator.store.base import WANTED_DEPLOYMENT, DeploymentRow, Store
from edge_client.blobs import BlobStore
from edge_client.logs import about
from edge_client.wire.chunks import transfer_id
from edge_client.wire.messages import Cancel, Deploy, Deployed, Message

__all__ = ["Deployments"]

log = logging.getLogger(__name__)

_AGAIN_S = 20.0
_UNDER_WAY = {"fetching": "downloading", "testing": "testing"}  # as devices say it, and as people read it


class Deployments:
    """The newest deployment of every device."""

    def __init__(
        self,
        *,
        store: Store,
        blobs: BlobStore,
        roster: Roster,
        send: Callable[[str, Message], None],
        release: Callable[[str], None],
    ) -> None:
        """`release` removes a blob that no row needs any more."""
        self._store, self._blobs, self._roster = store, blobs, roster
        self._send, self._release = send, release
        self._wanted = {row.device: row for row in store.wanted_deployments()}
        self._transfers = self._all_transfers()
        self._under_way: dict[str, str] = {}  # device -> what it said last
        self._asked_at: dict[str, float] = {}

    def add(self, rows: Sequence[DeploymentRow], now: float) -> None:
        """Record a deployment, durably, and tell those of its devices that are there."""
        before = self._store.add_deployment(rows)
        for row in rows:
            self._wanted[row.device] = row
            self._under_way.pop(row.device, None)
        self._transfers = self._all_transfers()
        for sha256 in {row.sha256 for row in before}:
            self._release(sha256)
        for row in rows:
            self._ask(row, now)

    def greeted(self, device: str, now: float) -> None:
        """A device said hello."""
        self._under_way.pop(device, None)
        row = self._wanted.get(device)
        if row is not None and row.state == "pending":
            self._ask(row, now)

    def tick(self, online: frozenset[str], now: float) -> None:
        """Ask again those who may not have heard it, or whose answer was lost."""
        for device, row in list(self._wanted.items()):
            due = self._asked_at.get(device, -_AGAIN_S) + _AGAIN_S
            if row.state == "pending" and device in online and now >= due:
                self._ask(row, now)

    def _ask(self, row: DeploymentRow, now: float) -> None:
        present = self._roster.presence(row.device)
        if present is None or not present.deploys:
            return
        if not self._blobs.verified(row.sha256):
            detail = "its file is missing or damaged on the server's disk; deploy it again"
            self._end(row, "refused", "lost", detail)
            return
        self._asked_at[row.device] = now
        self._send(row.device, _message(row))

    def told(self, device: str, said: Deployed) -> None:
        """What a device says of a deployment; of one that nobody wants any more it is told so."""
        row = self._wanted.get(device)
        if row is None or row.id != said.deployment:
            if said.state in _UNDER_WAY:
                self._send(device, Cancel(lease=said.deployment, code="over"))
        elif said.state in _UNDER_WAY:
            self._under_way[device] = said.state
        elif row.state == "pending" or (row.state == "active" and said.state == "rolled_back"):
            self._end(row, said.state, said.code if said.state != "active" else "", said.detail)

    def _end(self, row: DeploymentRow, state: str, code: str, detail: str) -> None:
        self._store.set_deployment(row.id, row.device, state, code=code, detail=detail)
        self._under_way.pop(row.device, None)
        level = logging.INFO if state == "active" else logging.WARNING
        why = f" ({code}: {detail!r})" if code else ""
        what = (row.device, row.run, row.version, state, why)
        log.log(level, "%s: run %s version %d is %s%s", *what, extra=about(device=row.device, run=row.run))
        if state in WANTED_DEPLOYMENT:
            self._wanted[row.device] = replace(row, state=state, code=code, detail=detail)
        else:
            del self._wanted[row.device]
            self._transfers = self._all_transfers()
            self._release(row.sha256)

    def removed(self, device: str) -> None:
        """A device is not enrolled any more; the store has forgotten its rows."""
        row = self._wanted.pop(device, None)
        self._under_way.pop(device, None)
        if row is not None:
            self._transfers = self._all_transfers()
            self._release(row.sha256)

    # what others ask

    def may_pull(self, device: str, sha256: str) -> int | None:
        """The length of a blob that this device may fetch now, or None."""
        row = self._wanted.get(device)
        return row.length if row is not None and row.state == "pending" and row.sha256 == sha256 else None

    def is_chunk(self, transfer: bytes) -> bool:
        """Whether a chunk belongs to a deployed file: such bytes are no part of a run's traffic."""
        return transfer in self._transfers

    def _all_transfers(self) -> frozenset[bytes]:
        return frozenset(transfer_id(row.sha256) for row in self._wanted.values())

    def describe(self, row: DeploymentRow, online: frozenset[str]) -> dict[str, Any]:
        """A row for people; `waits` tells why a pending one does not get on."""
        present = self._roster.presence(row.device)
        waits = ""
        if row.state == "pending" and (present is None or row.device not in online):
            waits = "offline: it is told when it comes back"
        elif row.state == "pending" and present is not None and not present.deploys:
            waits = f"too old: client {present.client!r} does not know deployments; upgrade it"
        newest = self._wanted.get(row.device)
        under_way = self._under_way.get(row.device) if newest is not None and newest.id == row.id else None
        return {
            "device": row.device,
            "state": _UNDER_WAY[under_way] if under_way and row.state == "pending" and not waits else row.state,
            "waits": waits,
            "code": row.code,
            "detail": row.detail,
            "deployment": row.id,
            "run": row.run,
            "version": row.version,
            "architecture": row.architecture,
            "precision": row.precision,
            "sha256": row.sha256,
            "bytes": row.length,
            "created_s": row.created_s,
        }


def _message(row: DeploymentRow) -> Deploy:
    return Deploy(
        deployment=row.id,
        run=row.run,
        version=row.version,
        architecture=row.architecture,
        precision=row.precision,
        input=tuple(row.input),
        classes_sha256=row.classes_sha256,
        sha256=row.sha256,
        length=row.length,
    )
