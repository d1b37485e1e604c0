"""Changes of the enrolled devices while the coordinator runs: add, label, remove.

Covers: the order in which store, broker, roster and open work learn of a change.
Does not cover: checking names and labels (`coordinator.requests.devices`), bundles.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from coordinator.conductor.conductor import Conductor
from coordinator.fleet.deployments import Deployments
from coordinator.fleet.downloads import Downloads
from coordinator.fleet.roster import Roster
from coordinator.fleet.uploads import Uploads
from coordinator.server.broker_accounts import BrokerAccounts
from coordinator.server.outbox import Outbox
from coordinator.store.base import Store
from coordinator.store.rows import DeviceRow
from edge_client.errors import FedfitError, MachineError
from edge_client.wire.messages import Refuse

__all__ = ["Enrolment"]


class Enrolment:
    """Who belongs to the federation, in all places that must agree on it."""

    def __init__(
        self,
        *,
        store: Store,
        accounts: BrokerAccounts,
        roster: Roster,
        uploads: Uploads,
        downloads: Downloads,
        conductor: Conductor,
        deployments: Deployments,
        outbox: Outbox,
    ) -> None:
        self._store = store
        self._accounts = accounts
        self._roster = roster
        self._uploads = uploads
        self._downloads = downloads
        self._conductor = conductor
        self._deployments = deployments
        self._outbox = outbox

    @property
    def is_external(self) -> bool:
        """Whether somebody else keeps the broker's accounts, and has to change them as well."""
        return self._accounts.are_external

    def add(self, rows: Sequence[DeviceRow], *, replace: bool = False) -> None:
        """Enrol devices, or give enrolled ones new secrets: all, or none and an error."""
        before = self._store.devices.all()
        names = {row.name for row in rows}
        others = [device for device in before if not (replace and device.name in names)]
        self._accounts.set_accounts([*others, *rows])  # first: a device without an account is worse than the reverse
        try:
            self._store.devices.add(*rows, replace=replace)
        except FedfitError:
            with contextlib.suppress(MachineError):
                self._accounts.set_accounts(before)
            raise
        self._roster.set_devices(self._store.devices.all())
        for name in names if replace else ():
            self._uploads.lost_connection(name)
            self._downloads.forget(name)

    def set_labels(self, name: str, labels: Mapping[str, str]) -> None:
        """Replace the labels that the coordinator gives to a device."""
        self._store.devices.set_labels(name, labels)
        self._roster.set_devices(self._store.devices.all())

    def remove(self, names: Sequence[str]) -> None:
        """Forget devices: their leases end, and the broker disconnects them and nobody else."""
        for name in names:
            self._dismiss(name)
            self._store.devices.remove(name)
        devices = self._store.devices.all()
        self._roster.set_devices(devices)
        for name in names:
            self._downloads.forget(name)
            self._conductor.removed(name, time.monotonic())
            self._deployments.removed(name)
        self._accounts.set_accounts(devices)

    def _dismiss(self, name: str) -> None:
        """Tell a device that it is removed: the embedded broker does so itself, another one may let it in for years."""
        present = self._roster.presence(name)
        if self._accounts.are_external and present is not None:
            detail = "this device was removed from the federation; join again with a new bundle"
            self._outbox.send(name, Refuse(boot=present.boot, code="removed", detail=detail, retry_s=3600.0))
