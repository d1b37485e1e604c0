"""The MQTT 3.1.1 transport: clean sessions, QoS 0, TLS with the federation's own CA.

One loop, `poll`, does everything that touches paho: connect when due, read, write, keep alive. A single-threaded caller
puts its own file descriptors into it. Other threads only append to the queue and wake the loop, so no lock is ever held
while paho runs.

Covers: connection, back-off, subscriptions, queue. Does not cover: packets (`transport.mqtt_client`), what messages
mean, pacing (`queued_bytes` tells).
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.errors import InputError
from edge_client.transport import certificates
from edge_client.transport.base import (
    Connected,
    Disconnected,
    Event,
    LossCode,
    OnEvent,
    Received,
    Will,
    check_message,
)
from edge_client.transport.light_paho import MQTTErrorCode, ReasonCode, paho
from edge_client.transport.mqtt_client import MAX_PACKET_BYTES, Client, make_client

__all__ = ["Backoff", "MqttTransport", "tls_context"]

log = logging.getLogger(__name__)

_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME: devices without a battery wake up in 1970
_USER_TIMEOUT_MS = 20_000  # unacknowledged bytes for so long: the link is dead, whatever TCP would still try
_FLUSH_S = 2.0
_EARLY_BYTES = 4 << 20
_READS_PER_POLL = 8  # each at most a buffer, before writing again
_WRITES_PER_POLL = 8  # each of many small messages or a large one, before reading again
_TOGETHER_BYTES = 262_144  # of messages that leave in one call
_CREDENTIAL_CODES = frozenset({134, 135})  # "bad user name or password", "not authorized": CONNACK 4 and 5
_PROTOCOL_ERROR = 130  # paho's name for a broken packet, and for CONNACK 1 (another version of MQTT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Full jitter: the n-th wait is anywhere between 0 and `min_s` times 2^n, at most `max_s`."""

    min_s: float = 1.0
    max_s: float = 60.0
    slowest_s: float = 3600.0

    def delay_s(self, attempt: int, rng: random.Random) -> float:
        """Wait before the next attempt after `attempt` failures in a row."""
        return rng.uniform(0.0, min(self.max_s, self.min_s * 2.0 ** min(attempt, 32)))

    def slow_delay_s(self, attempt: int, rng: random.Random) -> float:
        """Wait when only a person can make the next attempt succeed: twice as long each time, an hour at most."""
        longest = min(self.slowest_s, self.max_s * 2.0 ** min(attempt, 32))
        return rng.uniform(longest / 2, longest)


def tls_context(ca_pem: str | None) -> ssl.SSLContext:
    """TLS 1.2 or newer, host name checked, trusting `ca_pem` alone; without it, the authorities of this machine.

    With our own CA the dates of certificates are not looked at: the clock of a device is not trusted for anything.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_pem is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        return context
    try:
        context.load_verify_locations(cadata=ca_pem)
    except (ssl.SSLError, ValueError) as error:
        raise InputError(f"expected the CA certificate as PEM text, got {ca_pem[:40]!r}... ({error})") from error
    context.verify_flags = ssl.VerifyFlags(context.verify_flags | _NO_CHECK_TIME)
    return context


class MqttTransport:
    """A `Transport` over one MQTT connection; `name` is the device's or the coordinator's, also the user by default.

    `others` (host, port) are tried in turn when an attempt fails; a connection that was lost is first sought where it
    was. Waits grow with every turn through all of them.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        others: Sequence[tuple[str, int]] = (),
        name: str,
        on_event: OnEvent,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        will: Will | None = None,
        boot_id: str | None = None,
        backoff: Backoff | None = None,
        rng: random.Random | None = None,
        keepalive_s: int = 30,
    ) -> None:
        self._on_event = on_event
        self._backoff = backoff or Backoff()
        self._rng = rng or random.Random(secrets.randbits(64))
        self._keepalive_s = keepalive_s
        self._topics: dict[str, None] = {}  # an ordered set
        self._topics_changed = False
        self._asked: set[str] = set()  # topics of this connection that a SUBSCRIBE names
        self._unacknowledged: dict[int, list[str]] = {}  # message id of a SUBSCRIBE -> its topics
        self._queue: deque[tuple[str, bytes, bool]] = deque()
        self._queued_bytes = 0
        self._writing_bytes = 0  # handed to paho, not yet written
        self._lock = threading.Lock()  # queue, topics, requests; never held while paho runs
        self._events: deque[Event] = deque()
        self._early: list[Received] = []  # retained messages may overtake the last SUBACK
        self._early_bytes = 0
        self._wanted = self._drop_asked = self._accepted = self._connected = False
        self._loss: tuple[str, LossCode] | None = None  # why we end a connection ourselves
        self._due_s = 0.0
        self._failures = self._refusals = 0
        self._attempted_at_s = self._connected_at_s = 0.0
        self._waker_in, self._waker_out = socket.socketpair()
        self._waker_in.setblocking(False)
        self._waker_out.setblocking(False)
        # a broker may not bind client ids to users, so an id that others could guess would let them cut this connection
        client_id = f"{name}-{boot_id or secrets.token_hex(8)}"
        self._clients = []
        for address in ((host, port), *others):
            self._clients.append(self._make_client(client_id, username or name, password, tls, will))
            self._clients[-1].connect_async(*address, keepalive_s)
        self._turn = 0  # which of them is next
        self._client = self._clients[0]
        _keep_buffers()

    def _make_client(
        self, client_id: str, username: str, password: str | None, tls: ssl.SSLContext | None, will: Will | None
    ) -> Client:
        client = make_client(client_id, self._on_text)
        if password is not None:
            client.username_pw_set(username, password)
        if tls is not None:
            client.tls_set_context(tls)
        if will is not None:
            client.will_set(will.topic, will.payload, qos=0, retain=will.retain)
        client.on_socket_open = self._on_socket_open
        client.on_socket_register_write = _write_later
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_disconnect = self._on_disconnect
        return client

    @property
    def _where(self) -> str:
        return f"{self._client.host}:{self._client.port}"

    # any thread

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that were published and are not yet written to the socket."""
        return self._queued_bytes + self._writing_bytes

    def connect(self) -> None:
        """Begin to connect, and keep connected until `close`."""
        self._wanted = True
        self.wake()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Queue a message for this connection; without a connection it is dropped, as QoS 0 allows."""
        check_message(topic, payload)
        with self._lock:
            if not self._connected:
                return
            first = not self._queue
            self._queue.append((topic, payload, retain))
            self._queued_bytes += len(payload)
        if first:
            self.wake()

    def subscribe(self, topics: Sequence[str]) -> None:
        """Ask for topics, now and again on every connection."""
        with self._lock:
            self._topics.update(dict.fromkeys(topics))
            self._topics_changed = True
        self.wake()

    def unsubscribe(self, topics: Sequence[str]) -> None:
        """Unsubscribe, before anything that is published from now on."""
        with self._lock:
            for topic in topics:
                self._topics.pop(topic, None)
            self._topics_changed = True
        self.wake()

    def drop(self) -> None:
        """Give up this connection without a goodbye and connect again."""
        self._drop_asked = True
        self.wake()

    def wake(self) -> None:
        """Make a waiting `poll` return."""
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nobody waits
            self._waker_out.send(b"\0")

    # the thread that polls

    def close(self) -> None:
        """Write the queue (for at most two seconds), say goodbye, and end."""
        self._wanted = False
        if self._waker_in.fileno() >= 0:
            self._finish()

    def poll(self, timeout_s: float, extra_fds: Sequence[int] = ()) -> list[int]:
        """One turn of the loop; an attempt to connect may take five seconds. Returns the readable `extra_fds`."""
        self._connect_if_due()
        self._drop_if_due()
        self._send_subscriptions()
        ready = self._wait(timeout_s, extra_fds)
        sock = self._client.socket()
        if sock is not None:
            seen = ready.get(sock.fileno(), 0)
            if seen & ~select.POLLOUT or _pending(sock):
                self._read()
            self._send_subscriptions()  # what was just read may have changed them; before what it made us publish
            if self._wants_write():
                self._write()
            self._client.loop_misc()
        self._deliver()
        if self._waker_in.fileno() in ready:
            self._waker_in.recv(4096)
        return [fd for fd in extra_fds if fd in ready]

    def _wait(self, timeout_s: float, extra_fds: Sequence[int]) -> dict[int, int]:
        poller = select.poll()
        for fd in (self._waker_in.fileno(), *extra_fds):
            poller.register(fd, select.POLLIN)
        sock = self._client.socket()
        if sock is None:
            if self._wanted:
                timeout_s = min(timeout_s, self._due_s - time.monotonic())
        else:
            poller.register(sock.fileno(), select.POLLIN | (select.POLLOUT if self._wants_write() else 0))
            timeout_s = 0.0 if _pending(sock) else min(timeout_s, self._keepalive_s / 6)
        return dict(poller.poll(max(0.0, timeout_s) * 1000))

    def _wants_write(self) -> bool:
        return bool(self._queue) or self._writing_bytes > 0 or self._client.want_write()

    def _connect_if_due(self) -> None:
        if not self._wanted or self._client.socket() is not None or time.monotonic() < self._due_s:
            return
        self._client = self._clients[self._turn % len(self._clients)]
        self._attempted_at_s = time.monotonic()
        self._accepted = False
        self._loss = None
        self._early_bytes = 0
        self._asked.clear()
        self._unacknowledged.clear()
        try:
            self._client.reconnect()
        except ssl.SSLCertVerificationError as error:
            self._lost(certificates.explain(error, where=self._where, host=self._client.host), "refused")
        except (OSError, UnicodeError) as error:
            self._lost(f"cannot reach {self._where}: {getattr(error, 'strerror', None) or error}", "network")
        self._deliver()

    def _drop_if_due(self) -> None:
        if self._drop_asked:
            self._drop_asked = False
            self._cut(*(self._loss or ("dropped on request", "network")))
        elif not self._connected and time.monotonic() > self._attempted_at_s + self._keepalive_s:
            self._cut(f"{self._where} did not complete the connection within {self._keepalive_s} s", "network")
        self._deliver()

    def _cut(self, reason: str, code: LossCode) -> None:
        """End the connection at once from this side."""
        if self._client.socket() is not None:
            self._client.connect_async(self._client.host, self._client.port, self._keepalive_s)  # closes; calls nobody
            self._lost(reason, code)

    def _send_subscriptions(self) -> None:
        if not self._accepted or (self._connected and not self._topics_changed):
            return
        with self._lock:
            topics = [topic for topic in self._topics if topic not in self._asked]
            dropped = [topic for topic in self._asked if topic not in self._topics]
            self._topics_changed = False
        if dropped:
            self._client.unsubscribe(dropped)
            self._asked.difference_update(dropped)
        if topics:
            _, mid = self._client.subscribe([(topic, 0) for topic in topics])
            self._asked.update(topics)
            if mid is not None:
                self._unacknowledged[mid] = topics
        elif not self._connected and not self._unacknowledged:
            self._announce()

    def _announce(self) -> None:
        self._connected_at_s = time.monotonic()
        self._refusals = 0
        with self._lock:
            self._connected = True
        self._events.append(Connected())
        self._events.extend(self._early)
        self._early.clear()
        self._deliver()

    def _read(self) -> None:
        for _ in range(_READS_PER_POLL):
            try:
                self._client.loop_read()
            except (struct.error, ValueError, IndexError) as error:  # paho's decoders trust lengths
                self._cut(f"{self._where} sent a malformed packet ({error})", "network")
            if not self._events:
                return
            self._deliver()

    def _write(self) -> None:
        for _ in range(_WRITES_PER_POLL):
            if not self._client.want_write():
                messages = self._next_messages()
                if not messages:
                    return
                for topic, payload, retain in messages:
                    self._client.send_message(topic, payload, retain=retain)
            if self._client.loop_write() != MQTTErrorCode.MQTT_ERR_SUCCESS or self._client.want_write():
                return

    def _next_messages(self) -> list[tuple[str, bytes, bool]]:
        """Take from the queue what is written next, in one call where the client can do that."""
        messages: list[tuple[str, bytes, bool]] = []
        self._writing_bytes = 0
        with self._lock:
            while self._queue and len(messages) < self._client.messages_at_once:
                if messages and self._writing_bytes + len(self._queue[0][1]) > _TOGETHER_BYTES:
                    break
                messages.append(self._queue.popleft())
                self._writing_bytes += len(messages[-1][1])
            self._queued_bytes -= self._writing_bytes
        return messages

    def _deliver(self) -> None:
        while self._events:
            self._on_event(self._events.popleft())

    def _finish(self) -> None:
        end_s = time.monotonic() + _FLUSH_S
        while self._connected and self.queued_bytes and time.monotonic() < end_s:
            self.poll(0.1)
        with self._lock:
            self._connected = False
        if self._client.socket() is not None:
            self._client.disconnect()
            self._client.loop_write()
        self._client.connect_async("closed", 1)  # closes the socket, if the goodbye did not
        self._events.clear()
        self._waker_in.close()
        self._waker_out.close()

    # called by paho, inside `reconnect`, `loop_read`, `loop_write` and `loop_misc`: they only note what happened

    def _on_socket_open(self, client: paho.Client, userdata: Any, sock: Any) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)

    def _on_connect(self, client: paho.Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        if not reason.is_failure:
            self._accepted = True
        elif reason.value in _CREDENTIAL_CODES:
            self._loss = (f"{self._where} does not accept the user or the password ({reason})", "credentials")
        else:
            self._loss = (f"{self._where} refused the connection ({reason})", "refused")

    def _on_subscribe(
        self, client: paho.Client, userdata: Any, mid: int, reasons: list[ReasonCode], properties: Any
    ) -> None:
        topics = self._unacknowledged.pop(mid, [])
        refused = [topic for topic, reason in zip(topics, reasons, strict=False) if reason.is_failure]
        if refused:
            self._loss = (f"{self._where} refused to deliver {', '.join(refused)}", "subscription")
            self._accepted = False
            self._drop_asked = True

    def _on_text(self, topic: str, payload: bytes, retained: bool) -> None:
        event = Received(topic=topic, payload=payload, retained=retained)
        if self._connected:
            self._events.append(event)
        elif self._early_bytes < _EARLY_BYTES:
            self._early_bytes += len(event.payload)
            self._early.append(event)

    def _on_disconnect(
        self, client: paho.Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        if self._loss is None and reason.value == _PROTOCOL_ERROR:
            self._loss = (f"{self._where} does not speak MQTT 3.1.1 as expected", "refused")
        self._lost(*(self._loss or (f"connection to {self._where} lost", "network")))

    def _lost(self, reason: str, code: LossCode) -> None:
        now = time.monotonic()
        if self._connected and now - self._connected_at_s > 2 * self._backoff.min_s:
            self._failures = 0  # not after a moment's connection: a broker that lets us in only to cut us is in trouble
        if not self._connected:
            self._turn += 1
        self._failures += 1
        turns, untried = divmod(self._failures, len(self._clients))
        if code in ("credentials", "subscription") and not untried:
            wait_s = self._backoff.slow_delay_s(self._refusals, self._rng)
            self._refusals += 1
        else:
            wait_s = self._backoff.delay_s(0 if untried else turns - 1, self._rng)
        self._due_s = now + wait_s
        with self._lock:
            self._connected = self._accepted = False
            self._queue.clear()
            self._queued_bytes = self._writing_bytes = 0
        self._early.clear()
        log.debug("%s (%s); next attempt in %.1f s", reason, code, wait_s)
        self._events.append(Disconnected(reason=reason, code=code))


def _keep_buffers() -> None:
    """Let malloc keep a packet's memory for the next one, instead of giving it back and taking it again for each.

    glibc gives back what is free at the end of the heap beyond 128 KiB, a little more than one chunk; freeing a larger
    block that was mapped moves that limit to twice its size.
    """
    del [bytes(4 * MAX_PACKET_BYTES)][:]


def _pending(sock: object) -> int:
    """Bytes that TLS has decrypted and the descriptor no longer shows."""
    return sock.pending() if isinstance(sock, ssl.SSLSocket) else 0


def _write_later(client: paho.Client, userdata: Any, sock: Any) -> None:
    """Do nothing: with this callback paho does not write inside `publish` and `subscribe`; the loop writes itself."""
