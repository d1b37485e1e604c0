"""The bytes of a round through the broker and nothing else: no files, no hashes, no messages but credits.

Down, one publisher sends a blob on a topic that all devices hear; up, every device sends one, under the limits of real
uploads. What arrives is counted and forgotten. Each device is a process, as the publisher is, and all use the transport
of the clients. `python -m benchmarks.broker_alone ROLE PORT NUM BYTES REPEATS`: ROLE is `hub` or a device's number.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from edge_client.transport.base import Connected, Event, Received
from edge_client.transport.mqtt import MqttTransport
from edge_client.wire.chunks import CHUNK_BYTES

__all__ = ["Moved", "move"]

_PER_DEVICE_BYTES = 4 << 20
_TOTAL_BYTES = 12 << 20
_ACK_BYTES = 1 << 20
_QUEUE_BYTES = 4 * CHUNK_BYTES
_WAIT_S = 0.05


class Moved(NamedTuple):
    """Seconds of one repeat."""

    down_s: float
    up_s: float


def move(num_bytes: int, devices: int, repeats: int) -> list[Moved]:
    """Start a broker of our own and the processes, and move the bytes that often."""
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        broker = _broker(Path(folder), port)
        numbers = [str(port), str(devices), str(num_bytes), str(repeats)]
        command = [sys.executable, "-m", "benchmarks.broker_alone"]
        processes = [subprocess.Popen([*command, str(device), *numbers]) for device in range(devices)]
        try:
            hub = subprocess.run([*command, "hub", *numbers], stdout=subprocess.PIPE, check=True)
            return [Moved(*times) for times in json.loads(hub.stdout)]
        finally:
            for process in (*processes, broker):
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _broker(folder: Path, port: int) -> subprocess.Popen[bytes]:
    binary = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or "nats-server"
    config = folder / "nats.conf"
    config.write_text(
        f'server_name: bench\nlisten: "127.0.0.1:-1"\nmax_payload: 140KB\njetstream {{ store_dir: "{folder}" }}\n'
        f'mqtt {{ listen: "127.0.0.1:{port}" }}\n'
    )
    process = subprocess.Popen([binary, "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return process


class _Peer:
    """A connection; `heard` is called with what comes."""

    def __init__(self, name: str, port: int, topics: list[str], heard: Callable[[Received], None]) -> None:
        self._heard = heard
        self._is_connected = False
        self.transport = MqttTransport(host="127.0.0.1", port=port, name=name, on_event=self._on_event)
        self.transport.subscribe(topics)
        self.transport.connect()
        while not self._is_connected:
            self.transport.poll(_WAIT_S)

    def _on_event(self, event: Event) -> None:
        match event:
            case Connected():
                self._is_connected = True
            case Received():
                self._heard(event)


class _Device:
    def __init__(self, number: int, port: int) -> None:
        self._number, self._received, self._acknowledged, self._credit = number, 0, 0, 0
        self._peer = _Peer(f"d{number}", port, ["down", f"go/{number}"], self._hear)

    def _hear(self, received: Received) -> None:
        if received.topic == "down":
            self._received += len(received.payload)
        else:
            self._credit += int(received.payload)

    def run(self) -> None:
        """Acknowledge what comes, send what is asked for; until the process is killed."""
        chunk, transport, said_s = bytes(CHUNK_BYTES), self._peer.transport, 0.0
        while True:
            now = time.monotonic()
            if self._received - self._acknowledged >= _ACK_BYTES or now > said_s + 0.2:
                said_s, self._acknowledged = now, self._received
                transport.publish(f"ack/{self._number}", str(self._received).encode())
            while self._credit > 0 and transport.queued_bytes < _QUEUE_BYTES:
                self._credit -= CHUNK_BYTES
                transport.publish(f"up/{self._number}", chunk)
            transport.poll(0.002 if self._credit > 0 else _WAIT_S)


class _Hub:
    def __init__(self, port: int, devices: int, num_bytes: int) -> None:
        self._devices, self._num_chunks = devices, -(-num_bytes // CHUNK_BYTES)
        self._acknowledged: dict[str, int] = {}
        self._arrived = [0] * devices
        topics = [f"{kind}/{number}" for number in range(devices) for kind in ("ack", "up")]
        self._peer = _Peer("hub", port, topics, self._hear)
        while len(self._acknowledged) < devices:
            self._peer.transport.poll(_WAIT_S)

    def _hear(self, received: Received) -> None:
        kind, _, number = received.topic.partition("/")
        if kind == "ack":
            self._acknowledged[number] = int(received.payload)
        else:
            self._arrived[int(number)] += len(received.payload)

    def down(self) -> float:
        chunk, transport = bytes(CHUNK_BYTES), self._peer.transport
        before = min(self._acknowledged.values())
        total, sent, began = self._num_chunks * CHUNK_BYTES, 0, time.monotonic()
        while (done := min(self._acknowledged.values()) - before) < total:
            while sent < total and sent - done < _PER_DEVICE_BYTES and transport.queued_bytes < _QUEUE_BYTES:
                transport.publish("down", chunk)
                sent += CHUNK_BYTES
            transport.poll(0.002 if sent - done < _PER_DEVICE_BYTES and sent < total else _WAIT_S)
        return time.monotonic() - began

    def up(self) -> float:
        transport, total = self._peer.transport, self._num_chunks * CHUNK_BYTES
        asked, began = [0] * self._devices, time.monotonic()
        self._arrived = [0] * self._devices
        while min(self._arrived) < total:
            left = _TOTAL_BYTES - (sum(asked) - sum(self._arrived))
            for number in range(self._devices):
                window = _PER_DEVICE_BYTES - (asked[number] - self._arrived[number])
                most = min(window, left, total - asked[number])
                grant = most - most % CHUNK_BYTES
                if grant >= min(_ACK_BYTES, total - asked[number]) and grant > 0:
                    asked[number] += grant
                    left -= grant
                    transport.publish(f"go/{number}", str(grant).encode())
            transport.poll(_WAIT_S)
        return time.monotonic() - began


def main() -> int:
    """One process."""
    role, port, devices, num_bytes, repeats = sys.argv[1], *map(int, sys.argv[2:])
    if role != "hub":
        _Device(int(role), port).run()
    hub = _Hub(port, devices, num_bytes)
    json.dump([(hub.down(), hub.up()) for _ in range(repeats)], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
