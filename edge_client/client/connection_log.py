"""Logs a daemon's connection: one line for every loss, but only one for a problem that a person has to solve.

Covers: the log, and the end of a device that no broker lets in. Does not cover: connecting again (`transport.mqtt`),
sessions (`session`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from edge_client.errors import NetworkError
from edge_client.transport.base import Disconnected
from edge_client.wire.messages import Refuse

__all__ = ["ConnectionLog"]

log = logging.getLogger(__name__)

_SILENCE_S = 60.0  # without a welcome after a connection


class ConnectionLog:
    """The state of one device's connection since its daemon started."""

    def __init__(self, *, device: str, num_brokers: int, note_error: Callable[[str], None]) -> None:
        """`note_error` receives every error for the status file."""
        self._device = device
        self._num_brokers = num_brokers
        self._note_error = note_error
        self._was_connected = False
        self._num_refusals = 0
        self._connected_at: float | None = None  # None: not connected
        self._reported = ""  # the lasting trouble that was logged, and is not logged again

    def state(self, *, is_online: bool) -> str:
        """One word for the status file; `is_online`: the coordinator has accepted the device."""
        if self._connected_at is None:
            return "connecting"
        return "let_in" if is_online else "connected"

    def connected(self, now: float) -> None:
        """A broker accepted the device."""
        log.info("connected to the broker")
        self._was_connected = True
        self._connected_at = now

    def welcomed(self) -> None:
        """The coordinator accepted the device."""
        log.info("the coordinator let us in")
        self._reported = ""

    def refused(self, refuse: Refuse) -> None:
        """The coordinator refused the device."""
        log.warning("the coordinator refuses this device: %s: %s", refuse.code, refuse.detail)
        self._note_error(f"refused: {refuse.code}: {refuse.detail}")

    def lost(self, event: Disconnected) -> None:
        """The connection ended, or an attempt failed; raises `NetworkError` if no broker ever accepted the device."""
        self._num_refusals += event.code == "credentials"
        if self._num_refusals >= self._num_brokers and not self._was_connected:
            raise NetworkError(
                f"the broker does not let device {self._device!r} in ({event.reason}); "
                "was it removed? join again with a new bundle: coordinator device add NAME"
            )
        self._connected_at = None
        self._note_error(f"not connected ({event.code}): {event.reason}")
        if event.code != "credentials" or not self._was_connected:  # the bundle's other brokers are still to be tried
            log.warning("not connected (%s): %s; trying again", event.code, event.reason)
        elif self._reported != event.code:
            self._reported = event.code
            log.error(
                "the broker does not let device %r in any more (%s): it was removed or suspended, or has a new bundle; "
                "trying again, ever more rarely, at least once an hour; to mend it, join with a new bundle: "
                "coordinator device add NAME",
                self._device,
                event.reason,
            )

    def warn_of_silence(self, now: float, *, is_online: bool, refusal: str) -> None:
        """Warn if the coordinator does not answer: an external broker still accepts a device that was removed there."""
        waited = self._connected_at is not None and now - self._connected_at > _SILENCE_S
        if waited and not is_online and not refusal and self._reported != "silence":
            self._reported = "silence"
            log.warning(
                "connected to the broker, but the coordinator does not answer: is it running, and is device %r still "
                "one of its devices, with this bundle? trying again",
                self._device,
            )
