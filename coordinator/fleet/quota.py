"""How many useless messages and bytes a device may send before it is suspended. No I/O, no clock.

Each device has two leaky buckets: dropped messages, and bytes that nobody requested. A bucket that runs over suspends
the device for a minute, and twice as long each time it happens again; a calm hour resets that.

Does not cover: which messages are useless (`router`, `roster`, `uploads`), closing the connection (`broker_accounts`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["MAX_MESSAGES", "MAX_USELESS_BYTES", "PERIOD_S", "Quota"]

PERIOD_S = 60.0  # a full bucket is empty after this time
# an honest device repeats what was lost with a connection: a window of 4 MiB. A broker cuts a consumer that is 64 MB
# behind, and then the coordinator hears nobody: half of it must be enough to know who floods
MAX_USELESS_BYTES = 32 << 20
MAX_MESSAGES = 2000  # 33 a second; honest ones are dropped by the dozen, after a restart
_FIRST_SUSPENSION_S = 60.0
_LONGEST_SUSPENSION_S = 3600.0
_FORGIVEN_AFTER_S = 3600.0
_REPORT_EVERY_S = 10.0


@dataclass(slots=True)
class _Account:
    at: float  # when the buckets were last looked at
    messages: float = 0.0
    useless_bytes: float = 0.0
    suspended_until: float = float("-inf")
    num_suspensions: int = 0
    reported_at: float = float("-inf")
    num_unreported: int = 0


class Quota:
    """The accounts of all devices; a device without a dropped message has none."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._suspended: set[str] = set()  # those that were, and perhaps still are

    def charge(self, device: str, now: float, *, messages: float = 0.0, useless_bytes: int = 0) -> None:
        """Count against a device; it is suspended if that was too much."""
        account = self._accounts.setdefault(device, _Account(now))
        leaked = (now - account.at) / PERIOD_S  # of a full bucket
        account.at = now
        account.messages = max(0.0, account.messages - leaked * MAX_MESSAGES) + messages
        account.useless_bytes = max(0.0, account.useless_bytes - leaked * MAX_USELESS_BYTES) + useless_bytes
        if account.messages > MAX_MESSAGES or account.useless_bytes > MAX_USELESS_BYTES:
            _suspend(account, now)
            self._suspended.add(device)

    def is_suspended(self, device: str, now: float) -> bool:
        """Whether a device is suspended."""
        account = self._accounts.get(device)
        return account is not None and now < account.suspended_until

    def suspended(self, now: float) -> frozenset[str]:
        """All suspended devices."""
        self._suspended = {name for name in self._suspended if self.is_suspended(name, now)}
        return frozenset(self._suspended)

    def drops_to_report(self, device: str, now: float) -> int:
        """Count a drop; returns the number since the last report, or 0 while it is too early for another report."""
        account = self._accounts.setdefault(device, _Account(now))
        account.num_unreported += 1
        if now - account.reported_at < _REPORT_EVERY_S:
            return 0
        account.reported_at = now
        count, account.num_unreported = account.num_unreported, 0
        return count

    def keep_only(self, devices: Collection[str]) -> None:
        """Forget all others."""
        for name in [name for name in self._accounts if name not in devices]:
            del self._accounts[name]


def _suspend(account: _Account, now: float) -> None:
    if now - account.suspended_until > _FORGIVEN_AFTER_S:
        account.num_suspensions = 0
    doublings = min(account.num_suspensions, 10)
    account.suspended_until = now + min(_FIRST_SUSPENSION_S * 2**doublings, _LONGEST_SUSPENSION_S)
    account.num_suspensions += 1
    account.messages = account.useless_bytes = 0.0
