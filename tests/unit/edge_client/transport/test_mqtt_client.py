"""Packets out of a stream of bytes, however it is cut; and the way back to paho alone."""

from __future__ import annotations

import random
import socket

import pytest
from sites import BrokerSite, connected, pump

from edge_client.transport.mqtt_client import MAX_PACKET_BYTES, Client, FastClient, PacketBuffer, make_client


def _packet(head: int, body: bytes) -> bytes:
    """MQTT 3.1.1, section 2.2: the length in groups of seven bits, the lowest first."""
    rest, length = len(body), b""
    while rest > 127:
        length += bytes([rest % 128 + 128])
        rest //= 128
    return bytes([head]) + length + bytes([rest]) + body


class _Pieces:
    """A socket that gives the bytes of a stream in given pieces."""

    def __init__(self, stream: bytes, sizes: list[int]) -> None:
        self._stream, self._sizes = stream, sizes

    def recv_into(self, view: memoryview) -> int:
        size = min(self._sizes.pop(0) if self._sizes else 1 << 30, len(view), len(self._stream))
        view[:size] = self._stream[:size]
        self._stream = self._stream[size:]
        return size


def _read_all(stream: bytes, sizes: list[int]) -> list[tuple[int, bytes]]:
    buffer, sock, packets = PacketBuffer(), _Pieces(stream, sizes), []
    while buffer.read(sock):  # type: ignore[arg-type]
        packets += [(head, bytes(body)) for head, body in buffer.packets()]
    return packets


@pytest.mark.parametrize("seed", range(20))
def test_packets_come_as_they_were_sent_however_the_stream_is_cut(seed: int) -> None:
    """Of 0 to 262,144 bytes, with lengths of one to four bytes, in pieces of 1 to 200,000 bytes."""
    rng = random.Random(seed)
    lengths = [0, 1, 127, 128, 16_383, 16_384, 122_912, MAX_PACKET_BYTES]
    packets = [(rng.randrange(256), rng.randbytes(rng.choice(lengths))) for _ in range(12)]
    stream = b"".join(_packet(head, body) for head, body in packets)
    sizes = [rng.choice((1, 2, 3, 1000, 70_000, 200_000)) for _ in range(400)]
    assert _read_all(stream, sizes) == packets


@pytest.mark.parametrize("stream", [b"\x30\x81\x80\x10", b"\x30\xff\xff\xff\xff\x01", b"\x30\x80\x80\x80\x80"])
def test_a_length_that_is_too_large_or_too_long_is_refused(stream: bytes) -> None:
    """262,145 bytes; five bytes of length."""
    with pytest.raises(ValueError, match="at most 262144 are read"):
        _read_all(stream, [1] * 10)


def test_a_connection_without_large_packets_has_a_small_buffer() -> None:
    """4 KiB, also after ten thousand small packets: a device is idle most of the time."""
    buffer = PacketBuffer()
    sock = _Pieces(_packet(0x30, b"\0\1tx") * 10_000, [])
    while buffer.read(sock):  # type: ignore[arg-type]
        assert len(list(buffer.packets())) > 0
    assert len(buffer._bytes) == 4096


def test_the_short_way_is_used_with_the_paho_that_is_installed() -> None:
    """Whoever installs a paho that has changed inside finds out here, not by slow transfers."""
    assert isinstance(make_client("id", lambda topic, payload: None), FastClient)


@pytest.mark.broker
def test_without_the_short_way_messages_flow_as_well(broker_site: BrokerSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paho that has changed inside: everything goes through its interface."""
    monkeypatch.setattr(FastClient, "fits", staticmethod(lambda made: False))
    up, payload = broker_site.topics.device("d1", "up"), random.Random(1).randbytes(122_912)
    listener, device = connected(broker_site, "coordinator", (up,)), connected(broker_site, "d1")
    assert type(device.transport._client) is Client  # type: ignore[attr-defined]
    for _ in range(3):
        device.transport.publish(up, payload)
    pump(lambda: len(listener.received) == 3, listener, device)
    assert listener.received == [(up, payload)] * 3


def test_a_message_is_written_whole_through_a_socket_that_takes_little() -> None:
    """A send buffer of a few KB; between the pieces `want_write` says that there is more."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours.setblocking(False)
    client = make_client("id", lambda topic, payload: None)
    client.on_socket_register_write = lambda *_: None
    client._sock = ours
    payload = random.Random(2).randbytes(122_912)
    client.send_message("a/b", payload, retain=True)
    came = b""
    while client.want_write():
        client.loop_write()
        came += theirs.recv(1 << 20)
    assert came == _packet(0x31, b"\0\3a/b" + payload)
    client._sock = None
    ours.close()
    theirs.close()


def test_small_messages_leave_in_one_call() -> None:
    """32 messages: one `sendmsg`, and their packets in order; a socket that takes little changes no byte."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours.setblocking(False)
    calls = []

    class Counted:
        def sendmsg(self, parts: list[memoryview]) -> int:
            calls.append(len(parts))
            return ours.sendmsg(parts)

        def fileno(self) -> int:
            return ours.fileno()

    client = make_client("id", lambda topic, payload: None)
    client.on_socket_register_write = lambda *_: None
    client._sock = Counted()
    payloads = [random.Random(number).randbytes(40 * number) for number in range(client.messages_at_once)]
    for payload in payloads:
        client.send_message("a/b", payload, retain=False)
    came = b""
    while client.want_write():
        client.loop_write()
        came += theirs.recv(1 << 20)
    assert came == b"".join(_packet(0x30, b"\0\3a/b" + payload) for payload in payloads)
    assert calls[0] == 2 * len(payloads) - 1  # a head and a payload of each; the first is empty
    client._sock = None
    ours.close()
    theirs.close()
