"""The enrolled devices: their sessions, the proof of each message's sender, and presence. No I/O.

A device is present as long as its last message is recent by the coordinator's clock. A hello with a new boot id takes
over the session; if the old boot sends again afterwards, two clients use one identity, and the newer one is refused. A
device that floods the coordinator with useless messages is suspended for a while (`quota`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.fleet.changes import ChangedDevices
from coordinator.fleet.liveness import Liveness
from coordinator.fleet.quota import Quota
from coordinator.store.rows import DeviceRow
from edge_client.errors import PayloadError
from edge_client.records import DeviceProfile
from edge_client.wire import frames
from edge_client.wire.messages import (
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refuse,
    ReplayWindow,
    Welcome,
    context_down,
    context_up,
    open_message,
    seal_message,
)

__all__ = ["Presence", "Roster"]

_OFFLINE_AFTER = 2.5  # heartbeats
_DUPLICATE_AFTER_S = 3.0  # a last message of the old process may arrive after the new one's first
_DUPLICATE_RETRY_S = 60.0
_MESSAGE_COST = 0.1  # of a dropped one: an honest client fetches a model with up to 50 messages a second
_STRANGER = ""  # one account for all senders that are not enrolled
_ASK_HELLO_AFTER_S = 2.0  # messages of the old session may be on their way while the new one begins


@dataclass(slots=True)
class Presence:
    """A device with a session, and its newest facts about itself."""

    boot: str
    session: str
    since: float
    last_seen: float
    profile: DeviceProfile
    client: str
    labels: dict[str, str]  # of the device's file; `Roster.labels_of` adds the coordinator's
    tasks: dict[str, str]  # what its owner allows: name -> hash of the file
    free_bytes: int
    deploys: bool = False  # understands deployments
    window: ReplayWindow = field(default_factory=ReplayWindow)
    seq: int = 0
    is_used: bool = False  # the device has said something in this session
    heartbeat: Heartbeat | None = None


class Roster:
    """All enrolled devices and their sessions."""

    def __init__(self, federation: str, devices: Iterable[DeviceRow], *, epoch: int, heartbeat_s: float) -> None:
        self._federation = federation
        self._epoch = epoch
        self._heartbeat_s = heartbeat_s
        self._devices = {device.name: device for device in devices}
        self._present: dict[str, Presence] = {}
        self._liveness = Liveness(_OFFLINE_AFTER * heartbeat_s)
        self._previous: dict[str, Presence] = {}
        self._quota = Quota()
        self.changes = ChangedDevices()
        self.revision = 0  # grows whenever a session, or a row, is another one

    def set_devices(self, devices: Iterable[DeviceRow]) -> None:
        """The enrolled devices have changed; removed ones, and those with a new key, are gone at once."""
        before, self._devices = self._devices, {device.name: device for device in devices}
        self.revision += 1
        self.changes.note_all()
        for name, device in before.items():
            if name not in self._devices or self._devices[name].key != device.key:
                self._present.pop(name, None)
                self._previous.pop(name, None)
                self._liveness.left(name)
        self._quota.keep_only({*self._devices, _STRANGER})

    @property
    def num_enrolled(self) -> int:
        """How many devices are enrolled."""
        return len(self._devices)

    def names(self) -> list[str]:
        """All enrolled devices, sorted."""
        return sorted(self._devices)

    def row(self, name: str) -> DeviceRow | None:
        """An enrolled device."""
        return self._devices.get(name)

    def presence(self, name: str) -> Presence | None:
        """A device's session, if it has had one."""
        return self._present.get(name)

    def labels_of(self, name: str) -> dict[str, str]:
        """The labels of the device's file, as far as they are known, overridden by the coordinator's."""
        present, device = self._present.get(name), self._devices.get(name)
        return {**(present.labels if present else {}), **(device.labels if device else {})}

    def online(self, now: float) -> frozenset[str]:
        """Devices with a recent message that did not say goodbye and are not suspended.

        The same object as long as nothing has changed.
        """
        present, suspended = self._liveness.present(now), self._quota.suspended(now)
        return present - suspended if suspended else present

    def suspended(self, now: float) -> frozenset[str]:
        """Devices that sent too many useless messages lately; all their messages are ignored."""
        return self._quota.suspended(now)

    def is_suspended(self, name: str, now: float) -> bool:
        """Whether this device is one of them."""
        return self._quota.is_suspended(name, now)

    def charge_message(self, name: str, now: float) -> None:
        """Charge a device a little for a message other than a chunk."""
        if name in self._devices:
            self._quota.charge(name, now, messages=_MESSAGE_COST)

    def blame(self, name: str, useless_bytes: int, now: float) -> int:
        """Charge a dropped message; returns how many drops to log now, or 0 while it is too early for another line."""
        who = name if name in self._devices else _STRANGER
        if who != _STRANGER:
            self._quota.charge(who, now, messages=1, useless_bytes=useless_bytes)
        return self._quota.drops_to_report(who, now)

    def seen(self, name: str, now: float) -> bool:
        """Note a chunk as a sign of life; False if the device has no session."""
        present = self._present.get(name)
        if present is None:
            return False
        present.last_seen = now
        self._liveness.heard(name, now)
        return True

    def hint_gone(self, name: str, boot: str) -> None:
        """Note that the broker lost this client's connection; the client's next message withdraws that."""
        present = self._present.get(name)
        if present is not None and present.boot == boot:
            self._liveness.left(name)

    def seal(self, name: str, message: Message) -> bytes | None:
        """A message to a device in its session; None if it has none."""
        present = self._present.get(name)
        if present is None:
            return None
        present.seq += 1
        return self._seal(name, message, present.session, present.seq)

    def _seal(self, name: str, message: Message, session: str, seq: int) -> bytes:
        key = bytes.fromhex(self._devices[name].key)
        return seal_message(message, session=session, seq=seq, key=key, context=context_down(self._federation, name))

    def receive(self, name: str, payload: bytes, now: float) -> tuple[Message | None, bytes | None]:
        """A proven message of a device and an answer that is due at once; raises `PayloadError`."""
        device = self._devices.get(name)
        if device is None:
            raise PayloadError("unknown_device", f"device {name!r} is not enrolled")
        context = context_up(self._federation, name)
        sealed = open_message(payload, key=bytes.fromhex(device.key), context=context)
        if isinstance(sealed.message, Hello):
            return self._hello(name, sealed.message, now)
        present = self._present.get(name)
        if present is None or sealed.session != present.session:
            return self._foreign_session(name, sealed.session, sealed.seq, now)
        if not present.window.take(sealed.seq):
            raise PayloadError("replayed", f"message {sealed.seq} of {name!r} came twice")
        present.last_seen = now
        present.is_used = True
        if isinstance(sealed.message, Goodbye):
            self._liveness.left(name)
        else:
            self._liveness.heard(name, now)
        if isinstance(sealed.message, Heartbeat):
            present.heartbeat = sealed.message
            self.changes.note(name)
            present.free_bytes = sealed.message.free_bytes
        return sealed.message, None

    def _hello(self, name: str, hello: Hello, now: float) -> tuple[Message | None, bytes]:
        low, high = hello.protocol
        if not low <= frames.VERSION <= high:
            detail = f"this coordinator speaks version {frames.VERSION}, the client {low} to {high}"
            refuse = Refuse(boot=hello.boot, code="upgrade_required", detail=detail, retry_s=3600.0)
            return None, self._seal(name, refuse, "", 0)
        present = self._present.get(name)
        if present is not None and present.boot != hello.boot:
            self._previous[name] = present
        # a hello that is repeated because our answer comes late gets the session that it already has
        is_repeated = present is not None and present.boot == hello.boot and not present.is_used
        session = present.session if present is not None and is_repeated else secrets.token_hex(8)
        self._present[name] = Presence(
            boot=hello.boot,
            session=session,
            since=now,
            last_seen=now,
            profile=hello.profile,
            client=hello.client,
            labels=hello.labels,
            tasks=hello.tasks,
            free_bytes=hello.free_bytes,
            deploys=hello.deploys,
            seq=present.seq if present is not None and is_repeated else 0,
        )
        self.revision += 1
        self.changes.note(name)
        self._liveness.heard(name, now)
        welcome = Welcome(
            boot=hello.boot, hello=hello.hello, session=session, epoch=self._epoch, heartbeat_s=self._heartbeat_s
        )
        return hello, self._seal(name, welcome, "", 0)

    def _foreign_session(self, name: str, session: str, seq: int, now: float) -> tuple[None, bytes | None]:
        """A device that was let in before a restart of ours, or by a client that uses the same identity."""
        previous, present = self._previous.get(name), self._present.get(name)
        if present is None or (
            now - present.since > _ASK_HELLO_AFTER_S and not (previous and previous.session == session)
        ):
            refuse = Refuse(
                boot="any", code="session", detail="this coordinator does not know the session", retry_s=0.0
            )
            return None, self._seal(name, refuse, "", 0)
        if previous is None or previous.session != session:
            raise PayloadError("session", f"an old word of {name!r}")
        if not previous.window.take(seq) or now - present.since < _DUPLICATE_AFTER_S:
            raise PayloadError("session", f"an old word of {name!r}")
        self._present[name] = previous
        self.revision += 1
        self.changes.note(name)
        del self._previous[name]
        previous.last_seen = now
        self._liveness.heard(name, now)
        detail = f"another client uses the name {name!r}; add a device of its own for this machine"
        refuse = Refuse(boot=present.boot, code="duplicate_identity", detail=detail, retry_s=_DUPLICATE_RETRY_S)
        return None, self._seal(name, refuse, "", 0)
