"""Models that devices are to use: which device has which, which still waits for one, and which may fetch it.

A deployment is recorded before it is sent, and sent again until the device reports the outcome: at every hello, and
from time to time while the device is online. A model stays active until the device uses another one. A device that
uses a model reports it after every welcome; one that does not has lost the model, with its disk perhaps, and gets the
deployment again. A client that does not know deployments never gets one. What a device reports on the way (fetching,
testing, what it waits for) is for people, and is lost when this process ends.
Covers: deciding, rows, messages. Does not cover: exporting the files (`coordinator.cli.deploy`), sending them
(`coordinator.fleet.downloads`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.control_messages import DeployedModel, DeploymentLine
from coordinator.fleet.roster import Roster
from coordinator.store.base import Store
from coordinator.store.rows import DeploymentRow
from edge_client.logs import about
from edge_client.transport.blobs import BlobStore
from edge_client.wire.chunks import transfer_id
from edge_client.wire.messages import Cancel, Deploy, Deployed, Message

__all__ = ["Deployments"]

log = logging.getLogger(__name__)

_AGAIN_S = 20.0
_UNDER_WAY = {"fetching": "downloading", "testing": "testing"}  # as devices report it -> as people read it


class Deployments:
    """The model that each device is to use, and the one that it uses until then."""

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
        rows = store.deployments.wanted()
        self._pending = {row.device: row for row in rows if row.state == "pending"}
        self._active = {row.device: row for row in rows if row.state == "active"}
        self._transfers = self._all_transfers()
        self._under_way: dict[str, Deployed] = {}  # device -> its last report on the pending one
        self._doubtful: set[str] = set()  # devices that have not reported in this session that they use the active one
        self._asked_at: dict[str, float] = {}

    def add(self, rows: Sequence[DeploymentRow], now: float) -> None:
        """Record a deployment, durably, and send it to its devices that are online."""
        before = self._store.deployments.add(rows)
        for row in rows:
            self._pending[row.device] = row
            self._under_way.pop(row.device, None)
        self._let_go(before)
        for row in rows:
            self._ask(row, now)

    def greeted(self, device: str, now: float) -> None:
        """A device began a session."""
        self._under_way.pop(device, None)
        if device in self._pending:
            self._ask(self._pending[device], now)
        elif device in self._active:
            self._doubtful.add(device)
            self._asked_at[device] = now  # it reports that by itself

    def tick(self, online: frozenset[str], now: float) -> None:
        """Send deployments again that may be lost, whose report may be lost, or whose model the device lost."""
        doubted = {device: self._active[device] for device in self._doubtful if device in self._active}
        for device, row in (doubted | self._pending).items():
            if device in online and now >= self._asked_at.get(device, -_AGAIN_S) + _AGAIN_S:
                self._ask(row, now)

    def _ask(self, row: DeploymentRow, now: float) -> None:
        present = self._roster.presence(row.device)
        if present is None or not present.deploys:
            return
        if row.state == "pending" and not self._blobs.verified(row.sha256):
            detail = "its file is missing or damaged on the server's disk; deploy it again"
            self._set(row, "refused", "lost", detail)
            return
        self._asked_at[row.device] = now
        self._send(row.device, _message(row))

    def reported(self, device: str, report: Deployed) -> None:
        """A device reported on a deployment; one that nobody wants any more is cancelled there."""
        pending, active = self._pending.get(device), self._active.get(device)
        if pending is not None and pending.id == report.deployment:
            if report.state in _UNDER_WAY:
                self._under_way[device] = report
            else:
                self._set(pending, report.state, report.code, report.detail)
        elif active is not None and active.id == report.deployment:
            self._doubtful.discard(device)
            if report.state in ("refused", "rolled_back"):
                self._set(active, report.state, report.code, report.detail)
            elif report.state in _UNDER_WAY and pending is None:
                self._set(active, "pending")
                self._under_way[device] = report
            elif report.state in _UNDER_WAY:
                self._send(device, Cancel(lease=report.deployment, code="over"))
        elif report.state in _UNDER_WAY:
            self._send(device, Cancel(lease=report.deployment, code="over"))

    def _set(self, row: DeploymentRow, state: str, code: str = "", detail: str = "") -> None:
        is_bad = state in ("refused", "rolled_back")
        code, detail = (code, detail) if is_bad else ("", "")
        before = self._store.deployments.set_state(row.id, row.device, state, code=code, detail=detail)
        places = {"pending": self._pending, "active": self._active}
        del places[row.state][row.device]
        if state in places:
            places[state][row.device] = replace(row, state=state, code="", detail="")
        self._under_way.pop(row.device, None)
        lost = " again: the device does not have it any more" if state == "pending" else ""
        what = (row.device, row.run, row.version, state, f" ({code}: {detail!r})" if code else lost)
        level = logging.INFO if state == "active" else logging.WARNING
        log.log(level, "%s: run %s version %d is %s%s", *what, extra=about(device=row.device, run=row.run))
        self._let_go([*before, row] if is_bad else before)

    def _let_go(self, rows: Sequence[DeploymentRow]) -> None:
        """Release the files of these rows: the rows need them no more."""
        self._transfers = self._all_transfers()
        for sha256 in {row.sha256 for row in rows}:
            self._release(sha256)

    def removed(self, device: str) -> None:
        """A device is not enrolled any more; the store has forgotten its rows."""
        rows = [rows.pop(device) for rows in (self._pending, self._active) if device in rows]
        self._under_way.pop(device, None)
        self._doubtful.discard(device)
        self._let_go(rows)

    # what others ask

    def may_pull(self, device: str, sha256: str) -> int | None:
        """The length of a blob that this device may fetch now, or None."""
        row = self._pending.get(device)
        return row.length if row is not None and row.sha256 == sha256 else None

    def is_chunk(self, transfer: bytes) -> bool:
        """Whether a chunk belongs to a deployed file: such bytes are no part of a run's traffic."""
        return transfer in self._transfers

    def _all_transfers(self) -> frozenset[bytes]:
        hashes = {row.sha256 for rows in (self._pending, self._active) for row in rows.values()}
        return frozenset(transfer_id(sha256) for sha256 in hashes)

    def describe(self, row: DeploymentRow, online: frozenset[str]) -> DeploymentLine:
        """A row for people: why a pending one does not get on, and what the device uses instead."""
        is_open = row.state == "pending" and row.device in online
        under_way = self._under_way.get(row.device) if is_open else None
        active = self._active.get(row.device)
        return DeploymentLine(
            device=row.device,
            state=_UNDER_WAY[under_way.state] if under_way is not None else row.state,
            waits=self._waits(row, online, under_way),
            code=row.code,
            detail=row.detail,
            deployment=row.id,
            run=row.run,
            version=row.version,
            architecture=row.architecture,
            precision=row.precision,
            sha256=row.sha256,
            bytes=row.length,
            created_s=row.created_s,
            in_use=_model(active) if active is not None and active.id != row.id else None,
        )

    def _waits(self, row: DeploymentRow, online: frozenset[str], under_way: Deployed | None) -> str:
        present = self._roster.presence(row.device)
        if row.state != "pending":
            return ""
        if present is None or row.device not in online:
            return "offline: it is told when it comes back"
        if not present.deploys:
            return f"too old: client {present.client!r} does not know deployments; upgrade it"
        if under_way is not None and under_way.code != "ok":
            return f"{under_way.code}: {under_way.detail}; it is tried again"
        return ""


def _model(row: DeploymentRow) -> DeployedModel:
    return DeployedModel(
        deployment=row.id, run=row.run, version=row.version, architecture=row.architecture, precision=row.precision
    )


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
