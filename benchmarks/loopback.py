"""The limit that transfers are held against: bytes through one TCP connection between two processes of this machine."""

from __future__ import annotations

import os
import socket
import time

__all__ = ["loopback_mb_s"]

_PIECE = 256 * 1024
_PIECES = 4096  # 1 GiB


def loopback_mb_s(repeats: int = 5) -> tuple[float, ...]:
    """MB/s of send and recv_into with 256 KiB buffers, once per repeat."""
    return tuple(_once() for _ in range(repeats))


def _once() -> float:
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        with socket.create_connection(listener.getsockname()) as sender:
            piece = bytes(_PIECE)
            for _ in range(_PIECES):
                sender.sendall(piece)
        os._exit(0)
    receiver, _ = listener.accept()
    buffer = bytearray(_PIECE)
    began, received = time.monotonic(), 0
    while count := receiver.recv_into(buffer):
        received += count
    seconds = time.monotonic() - began
    os.waitpid(child, 0)
    receiver.close()
    listener.close()
    return received / 1e6 / seconds
