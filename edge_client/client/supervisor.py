"""Reports the state of this process to systemd (sd_notify); does nothing if systemd did not ask for it.

    READY=1        it serves
    WATCHDOG=1     a turn of its loop was done; without one for WatchdogSec the service is started anew
    STATUS=...     what it does, for `systemctl status`
    STOPPING=1     it was asked to end

The watchdog is fed from the loop that does the work, never by a thread or a timer beside it: a process that only
exists is not fed. Does not cover: a worker that hangs, which the daemon ends (`worker_stall`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

__all__ = ["Supervisor"]

_SHARE = 4  # of the time that systemd waits: three may get lost
_LONGEST_STATUS = 200


class Supervisor:
    """The connection to systemd; without an address every call does nothing."""

    def __init__(self, address: str = "", *, watchdog_s: float = 0.0) -> None:
        """`address` is a path, or a name behind `@`; after `watchdog_s` of silence systemd ends us (0: never)."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._every_s = watchdog_s / _SHARE if watchdog_s > 0 else None
        self._due = 0.0
        self._status = ""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Supervisor:
        """Read systemd's variables and remove them, so that child processes do not report in our place."""
        address = environment.pop("NOTIFY_SOCKET", "")
        watchdog_us, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        for_us = pid in ("", str(os.getpid())) and watchdog_us.isdecimal()
        return cls(address if address[:1] in ("/", "@") else "", watchdog_s=int(watchdog_us) / 1e6 if for_us else 0.0)

    @property
    def is_there(self) -> bool:
        """Whether a service manager started this process."""
        return bool(self._address)

    def ready(self) -> None:
        """The process serves; to repeat this after a restart of the daemon changes nothing."""
        self._send("READY=1")

    def alive(self, now: float) -> None:
        """A turn of the loop was done; reported as often as the watchdog needs it."""
        if self._every_s is not None and now >= self._due:
            self._due = now + self._every_s
            self._send("WATCHDOG=1")

    def doing(self, status: str) -> None:
        """Report what the process does, in one line; an unchanged line is not sent again."""
        line = " ".join(status.split())[:_LONGEST_STATUS]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def stopping(self) -> None:
        """The process was asked to end."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        """Send a datagram; errors are ignored, because a service must not fail when its supervisor does."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
            way.setblocking(False)
            way.sendto(message.encode(), self._address)
