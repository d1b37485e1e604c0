"""Who may connect to the embedded broker: enrolled devices, except those that flood the coordinator.

Covers: a device's rights at the broker, its suspension.
Does not cover: when a device floods (`coordinator.fleet.quota`), enrolling (`coordinator.server.enrolment`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from coordinator.broker.broker import DeviceAccess, EmbeddedBroker
from coordinator.store.base import Store
from coordinator.store.rows import DeviceRow
from edge_client.errors import DiskFullError, MachineError
from edge_client.logs import about
from edge_client.wire.topics import Topics

__all__ = ["BrokerAccounts", "access_of"]

log = logging.getLogger(__name__)

_RETRY_S = 10.0


def access_of(device: DeviceRow, topics: Topics) -> DeviceAccess:
    """What a device may do at the broker: exactly its own topics."""
    return DeviceAccess(
        name=device.name,
        password=device.password,
        publish=topics.device_publishes(device.name),
        subscribe=topics.device_may_subscribe(device.name),
    )


class BrokerAccounts:
    """The accounts of the embedded broker; somebody else's broker keeps its own, and every call does nothing."""

    def __init__(self, broker: EmbeddedBroker | None, store: Store, topics: Topics) -> None:
        self._broker = broker
        self._store = store
        self._topics = topics
        self._suspended: frozenset[str] = frozenset()
        self._retry_at = 0.0

    @property
    def are_external(self) -> bool:
        """Whether somebody else keeps the accounts."""
        return self._broker is None

    def set_accounts(self, devices: Iterable[DeviceRow]) -> None:
        """Give accounts to these devices and to nobody else; the broker disconnects those that lost theirs."""
        if self._broker is not None:
            allowed = [device for device in devices if device.name not in self._suspended]
            self._broker.set_devices(access_of(device, self._topics) for device in allowed)

    def suspend(self, names: frozenset[str], now: float) -> None:
        """Shut out these devices, and let in again whoever is not among them any more."""
        before = self._suspended
        if before == names or now < self._retry_at:
            return
        self._suspended = names
        for name in sorted(before ^ names):
            change = "suspended: flooding" if name in names else "let in again"
            log.warning("%s is %s", name, change, extra=about(device=name))
        try:
            self.set_accounts(self._store.devices.all())
        except DiskFullError:
            raise
        except MachineError as error:  # a broker under a flood may be slow; the roster ignores these devices anyway
            self._suspended, self._retry_at = before, now + _RETRY_S
            log.error("%s", error)
