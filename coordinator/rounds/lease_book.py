"""The leases of an attempt, found by id and by device; what asks whether any is still open looks at a number.

A round of a thousand devices asks these questions at every message, so none of them may look at every lease.

Covers: finding and counting. Does not cover: what happens to a lease (`attempt`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from coordinator.store.rows import OPEN_LEASE, LeaseRow

__all__ = ["LeaseBook"]


class LeaseBook:
    """All leases of one attempt, in the order in which they were issued."""

    def __init__(self, leases: Iterable[LeaseRow]) -> None:
        self._by_id: dict[str, LeaseRow] = {}
        self._open: dict[str, LeaseRow] = {}
        self._open_of: dict[str, dict[str, LeaseRow]] = {}  # device -> its open leases, by id
        self._num_open: Counter[bool] = Counter()  # by whether the device trains
        for lease in leases:
            self.put(lease)

    @property
    def by_id(self) -> Mapping[str, LeaseRow]:
        """All leases."""
        return self._by_id

    def put(self, lease: LeaseRow) -> None:
        """Add a lease, or replace the row of one whose state has changed."""
        was_open, is_open = lease.id in self._open, lease.state in OPEN_LEASE
        self._by_id[lease.id] = lease
        self._num_open[lease.train] += is_open - was_open
        if is_open:
            self._open[lease.id] = lease
            self._open_of.setdefault(lease.device, {})[lease.id] = lease
        elif was_open:
            del self._open[lease.id]
            of_device = self._open_of[lease.device]
            del of_device[lease.id]
            if not of_device:
                del self._open_of[lease.device]

    def find_open(self, lease_id: str) -> LeaseRow | None:
        """A lease that has not ended, or None."""
        return self._open.get(lease_id)

    def all_open(self) -> list[LeaseRow]:
        """The leases that have not ended."""
        return list(self._open.values())

    def open_of(self, device: str) -> list[LeaseRow]:
        """The leases of a device that have not ended."""
        return list(self._open_of.get(device, {}).values())

    def open_devices(self) -> set[str]:
        """The devices with a lease that has not ended."""
        return set(self._open_of)

    def num_open(self, *, train: bool) -> int:
        """How many leases have not ended, of devices that train or of those that do not."""
        return self._num_open[train]
