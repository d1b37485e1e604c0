"""How a device leaves its federation: it says goodbye to the coordinator, then removes its identity and its work.

The owner's file, device.toml, stays, and so does a deployed model, which the owner's programs may use.
Does not cover: forgetting it at the coordinator (`coordinator device remove`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path

from edge_client import __version__, durable
from edge_client.client import connection
from edge_client.client.identity import STATE_KIND, STATE_VERSION, Bundle
from edge_client.errors import ConflictError, PayloadError
from edge_client.records import DeviceProfile
from edge_client.transport.base import Connected, Disconnected, Event, Received, Transport
from edge_client.wire.messages import (
    Assign,
    Decline,
    Goodbye,
    Hello,
    Message,
    Welcome,
    context_down,
    context_up,
    open_message,
    seal_message,
)
from edge_client.wire.topics import Topics

__all__ = ["leave", "say_goodbye"]

_WITHIN_S = 8.0
_LISTEN_S = 0.5  # a coordinator that just greeted us may hand out work in the same breath: it gets it back at once
_FOLDERS = ("work", "blobs", "tmp", "method-state")
_FILES = ("state.json", "state.json.damaged", "status.json", "identity/bundle.json")  # last the identity: it has left


def leave(state_dir: Path, bundle: Bundle) -> bool:
    """Remove everything but device.toml; returns whether the coordinator was informed."""
    if durable.is_claimed(state_dir):
        raise ConflictError(
            f"a client runs on {state_dir}; stop it first: Ctrl-C where it was started, or stop its service"
        )
    lock = durable.claim_state_dir(state_dir, kind=STATE_KIND, version=STATE_VERSION)
    try:
        heard = say_goodbye(bundle)
        with durable.disk_errors(f"cannot remove what is below {state_dir}"):
            _remove(state_dir)
    finally:
        os.close(lock)
    return heard


def _remove(state_dir: Path) -> None:
    for name in _FOLDERS:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(state_dir / name)
    for name in _FILES:
        (state_dir / name).unlink(missing_ok=True)
    (state_dir / "identity").rmdir()
    durable.sync_dir(state_dir)


def say_goodbye(bundle: Bundle, *, within_s: float = _WITHIN_S) -> bool:
    """Connect, begin a session, and say goodbye; False if that cannot be done in time."""
    boot = secrets.token_hex(8)
    parting = _Parting(bundle, boot)
    transport = connection.connect(bundle, parting.on_event, boot)
    parting.transport = transport
    transport.subscribe(Topics(bundle.federation).device_subscribes(bundle.device))
    transport.connect()
    until = time.monotonic() + within_s
    try:
        while time.monotonic() < min(until, parting.until):
            transport.poll(0.05)
        return parting.end()
    finally:
        transport.close()


class _Parting:
    """A client that connects only to say goodbye."""

    def __init__(self, bundle: Bundle, boot: str) -> None:
        self._bundle, self._boot = bundle, boot
        self._topics = Topics(bundle.federation)
        self._session = ""
        self._seq = 0
        self._failures = 0
        self.transport: Transport | None = None
        self.until = float("inf")

    def on_event(self, event: Event) -> None:
        """Say hello, wait a moment after the welcome, decline new work; give up if no broker or coordinator answers."""
        if isinstance(event, Connected):
            profile = DeviceProfile(budget_bytes=0)
            self._send(Hello(boot=self._boot, hello=1, client=__version__, profile=profile, labels={}, free_bytes=0))
        elif isinstance(event, Disconnected):
            self._failures += 1
            if self._failures >= len(self._bundle.brokers):
                self.until = 0.0
        elif isinstance(event, Received) and event.topic == self._topics.device(self._bundle.device, "cmd"):
            context = context_down(self._bundle.federation, self._bundle.device)
            with contextlib.suppress(PayloadError):
                self._on_message(open_message(event.payload, key=self._bundle.key_bytes(), context=context).message)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Welcome) and message.boot == self._boot:
            self._session, self._seq = message.session, 0
            self.until = time.monotonic() + _LISTEN_S
        elif isinstance(message, Assign) and self._session:
            self._send(Decline(lease=message.lease, code="leaving", detail="this device leaves the federation"))

    def end(self) -> bool:
        """Say goodbye, if the coordinator accepted this device."""
        if not self._session or self.transport is None:
            return False
        self._send(Goodbye(reason="leaving"))
        self.transport.publish(self._topics.device(self._bundle.device, "state"), b"", retain=True)
        return True

    def _send(self, message: Message) -> None:
        assert self.transport is not None
        context = context_up(self._bundle.federation, self._bundle.device)
        key = self._bundle.key_bytes()
        sealed = seal_message(message, session=self._session, seq=self._seq, key=key, context=context)
        self._seq += 1
        self.transport.publish(self._topics.device(self._bundle.device, "up"), sealed)
