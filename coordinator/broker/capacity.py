"""How much memory and time the embedded broker gets, from the number of devices that may connect.

A connection costs the broker 70 to 90 kB, with TLS 16 kB more. NATS is a Go program: when its live memory reaches the
limit, it collects garbage without pause, and every message takes twenty times the CPU time. The limit is read when the
process starts and a reload cannot change it, so it leaves room for a quarter more devices than are enrolled; beyond
them the broker starts anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["BrokerCapacity", "reload_s"]

_SMALL_FLEET = 3000
_ROOM = 1.25
# few connections: collecting less often saves about a third of the CPU time for 130 MB
_SMALL_RUNTIME = {"GOGC": "400", "GOMEMLIMIT": "256MiB"}
_BASE_MIB = 64
_MIB_PER_DEVICE, _MIB_PER_DEVICE_WITH_TLS = 0.08, 0.1
_SHARE_OF_MACHINE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerCapacity:
    """What one process of the broker is prepared for."""

    num_devices: int  # with more of them it is to be started anew
    memory_mib: int | None  # None: the setting of small fleets

    @classmethod
    def plan(cls, num_devices: int, *, has_tls: bool, machine_bytes: int) -> BrokerCapacity:
        """Room for `num_devices` and a quarter more, in at most a quarter of the machine's memory."""
        if num_devices <= _SMALL_FLEET:
            return cls(num_devices=_SMALL_FLEET, memory_mib=None)
        planned = math.ceil(_ROOM * num_devices)
        wanted = _BASE_MIB + (_MIB_PER_DEVICE_WITH_TLS if has_tls else _MIB_PER_DEVICE) * planned
        most = machine_bytes // _SHARE_OF_MACHINE >> 20
        return cls(num_devices=planned, memory_mib=min(math.ceil(wanted), most))

    def environment(self) -> dict[str, str]:
        """The variables of Go's runtime; those that the coordinator was started with go before them."""
        if self.memory_mib is None:
            return dict(_SMALL_RUNTIME)
        return {"GOGC": "100", "GOMEMLIMIT": f"{self.memory_mib}MiB"}


def reload_s(num_users: int) -> float:
    """How long the broker may take to read its users again: 4 MB of them for ten thousand devices."""
    return 5.0 + num_users / 500
