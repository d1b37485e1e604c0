"""paho's client, with a limit on what it reads, and a short way for the messages that make up a transfer.

paho alone reads the head of a packet byte by byte, copies a message four times on its way in and twice on its way out:
half of the CPU time of a transfer. `FastClient` takes messages at QoS 0 out of one buffer with one copy and writes them
with none. Everything else stays with paho: connecting, subscribing, keeping alive, messages at other levels.

Covers: reading and writing packets. Does not cover: when to connect, read and write (`transport.mqtt`).
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from edge_client.transport.light_paho import CallbackAPIVersion, MQTTErrorCode, MQTTException, paho

__all__ = ["MAX_PACKET_BYTES", "Client", "FastClient", "PacketBuffer", "make_client"]

MAX_PACKET_BYTES = 262_144  # nothing of ours is larger; a hostile broker must not make a device allocate more
CONNECT_TIMEOUT_S = 5.0
_SMALL_BYTES = 4096  # the buffer of a connection that has seen no large packet: most are idle
_LARGE_BYTES = 2 * MAX_PACKET_BYTES
_LEAST_READ_BYTES = 65_536
_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_PUBLISH, _RETAIN, _KIND_AND_QOS = 0x30, 0x01, 0xF6

OnText = Callable[[str, bytes, bool], None]  # topic, payload, whether the broker had retained it
Packet = tuple[int, memoryview]  # the first byte, and what follows the length


class Client(paho.Client):
    """paho with a limit on what it reads, and no socket left open by a failed handshake."""

    messages_at_once = 1  # so many may be unwritten

    def send_message(self, topic: str, payload: bytes, *, retain: bool) -> None:
        """Begin to send a message at QoS 0; `want_write` tells when all are written."""
        self.publish(topic, payload, qos=0, retain=retain)

    def _sock_recv(self, bufsize: int) -> bytes:
        if bufsize > MAX_PACKET_BYTES:
            raise ConnectionError(f"the broker announced {bufsize} bytes, at most {MAX_PACKET_BYTES} are read")
        return super()._sock_recv(bufsize)

    def _ssl_wrap_socket(self, tcp_sock: socket.socket) -> ssl.SSLSocket:
        assert self._ssl_context is not None
        sock = self._ssl_context.wrap_socket(tcp_sock, server_hostname=self.host, do_handshake_on_connect=False)
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.do_handshake()
        except OSError:
            sock.close()
            raise
        return sock


class PacketBuffer:
    """Bytes of a connection, and the packets in them."""

    def __init__(self) -> None:
        self._bytes = bytearray(_SMALL_BYTES)
        self._view = memoryview(self._bytes)
        self._begin = self._end = 0  # of what was read and is no whole packet yet
        self._needed = 2  # so many bytes has the packet at `_begin`, as far as it is known

    def read(self, sock: socket.socket) -> int:
        """Read once; from TLS, whose records are small, until a packet is there or nothing more is. 0 at the end."""
        self._make_room()
        total = 0
        while True:
            try:
                count = sock.recv_into(self._view[self._end :])
            except _WAIT:
                if total:
                    return total
                raise
            self._end += count
            total += count
            whole = self._end - self._begin >= self._needed
            if count == 0 or whole or not isinstance(sock, ssl.SSLSocket):
                return total

    def _make_room(self) -> None:
        if self._begin == self._end:
            self._begin = self._end = 0
        free = len(self._bytes) - self._end
        if self._begin + self._needed <= len(self._bytes) and (self._begin == 0 or free >= _LEAST_READ_BYTES):
            return
        held = self._view[self._begin : self._end]
        target = self._bytes if self._needed <= len(self._bytes) else bytearray(_LARGE_BYTES)
        target[: len(held)] = bytes(held)
        self._begin, self._end = 0, len(held)
        self._bytes, self._view = target, memoryview(target)

    def packets(self) -> Iterator[Packet]:
        """The whole packets that are here, each to be used before the next; raises `ValueError` for a broken one."""
        while (size := self._head()) is not None and self._begin + self._needed <= self._end:
            begin, self._begin = self._begin, self._begin + self._needed
            self._needed = 2
            yield self._bytes[begin], self._view[begin + size : self._begin]

    def _head(self) -> int | None:
        """Bytes of the next packet's head, None if it is not whole; sets `_needed`."""
        length = 0
        for size in range(2, 6):
            at = self._begin + size - 1
            if at >= self._end:
                self._needed = size
                return None
            length |= (self._bytes[at] & 127) << 7 * (size - 2)
            if self._bytes[at] < 128:
                break
        if self._bytes[at] > 127 or length > MAX_PACKET_BYTES:
            raise ValueError(f"a packet of {length} bytes or more, at most {MAX_PACKET_BYTES} are read")
        self._needed = size + length
        return size


class FastClient(Client):
    """Gives messages at QoS 0 to `on_text` directly; what it uses of paho beside the interface is in `fits`."""

    messages_at_once = 32

    def __init__(self, *arguments: Any, on_text: OnText, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._on_text = on_text
        self._incoming = PacketBuffer()
        self._unsent: list[memoryview] = []

    @staticmethod
    def fits(client: paho.Client) -> bool:
        """Whether this version of paho is as expected."""
        methods = ("_packet_handle", "_packet_read", "_packet_write")
        fields = ("_in_packet", "_last_bytes_received", "_last_msg_out", "_msgtime_mutex", "_sock")
        return all(hasattr(client, name) for name in (*methods, *fields))

    def reconnect(self) -> MQTTErrorCode:
        """A new connection begins with a new packet, both ways."""
        self._incoming = PacketBuffer()
        self._unsent = []
        return super().reconnect()

    def _packet_read(self) -> MQTTErrorCode:
        sock: Any = self._sock
        try:
            if sock is None or self._incoming.read(sock) == 0:
                return MQTTErrorCode.MQTT_ERR_CONN_LOST
        except _WAIT:
            return MQTTErrorCode.MQTT_ERR_AGAIN
        except OSError:
            return MQTTErrorCode.MQTT_ERR_CONN_LOST
        with self._msgtime_mutex:
            self._last_bytes_received = time.monotonic()
        for head, body in self._incoming.packets():
            if head & _KIND_AND_QOS == _PUBLISH:
                self._take_message(body, retained=bool(head & _RETAIN))
            elif (result := self._take_other(head, body)) != MQTTErrorCode.MQTT_ERR_SUCCESS or self._sock is not sock:
                return result
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _take_message(self, body: memoryview, *, retained: bool) -> None:
        end = 2 + int.from_bytes(body[:2], "big")
        if not 2 < end <= len(body):
            raise ValueError(f"a topic of {end - 2} bytes in a packet of {len(body)}")
        self._on_text(str(body[2:end], "utf-8"), bytes(body[end:]), retained)

    def _take_other(self, head: int, body: memoryview) -> MQTTErrorCode:
        self._in_packet.update({"command": head, "packet": bytearray(body), "remaining_length": len(body)})
        try:
            return self._packet_handle()
        except MQTTException:  # a malformed packet
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        finally:
            self._in_packet.update({"command": 0, "packet": bytearray(), "remaining_length": 0, "pos": 0})

    def send_message(self, topic: str, payload: bytes, *, retain: bool) -> None:
        """As `Client`, without paho: the messages that are unwritten leave in one call."""
        name = topic.encode()
        rest = 2 + len(name) + len(payload)
        head = bytearray([_PUBLISH | (_RETAIN if retain else 0)])
        while rest > 127:
            head.append(rest & 127 | 128)
            rest >>= 7
        head += struct.pack(">BH", rest, len(name)) + name
        self._unsent += [memoryview(part) for part in (head, payload) if part]

    def want_write(self) -> bool:
        """Whether something waits to be written, of ours or of paho."""
        return bool(self._unsent) or super().want_write()

    def _packet_write(self) -> MQTTErrorCode:
        try:
            while self._unsent:
                self._send_some(self._sock)
        except _WAIT:
            return MQTTErrorCode.MQTT_ERR_AGAIN
        except OSError:
            return MQTTErrorCode.MQTT_ERR_CONN_LOST
        with self._msgtime_mutex:
            self._last_msg_out = time.monotonic()
        return super()._packet_write()

    def _send_some(self, sock: Any) -> None:
        if sock is None:
            raise ConnectionError("there is no connection")
        if isinstance(sock, ssl.SSLSocket):  # has no sendmsg, and makes a record of every send
            self._unsent = [memoryview(b"".join(self._unsent))] if len(self._unsent) > 1 else self._unsent
            count = sock.send(self._unsent[0])
        else:
            count = sock.sendmsg(self._unsent)
        num_whole = 0
        while num_whole < len(self._unsent) and count >= len(self._unsent[num_whole]):
            count -= len(self._unsent[num_whole])
            num_whole += 1
        del self._unsent[:num_whole]
        if self._unsent:
            self._unsent[0] = self._unsent[0][count:]


def make_client(client_id: str, on_text: OnText) -> Client:
    """A client for MQTT 3.1.1 with a clean session; the plain one if paho has changed too much."""
    # reconnect_on_failure: otherwise paho answers a refused protocol version by trying MQTT 3.1 on its own
    options: dict[str, Any] = {"client_id": client_id, "clean_session": True, "reconnect_on_failure": False}
    client: Client = FastClient(CallbackAPIVersion.VERSION2, on_text=on_text, **options)
    if not FastClient.fits(client):
        client = Client(CallbackAPIVersion.VERSION2, **options)
        client.on_message = lambda client, userdata, m: on_text(m.topic, bytes(m.payload), m.retain)
    client.connect_timeout = CONNECT_TIMEOUT_S
    return client
