"""The limit that transfers are held against: bytes through one TCP connection between two processes of this machine.

`blob_mb_s` moves what a transfer moves, a model of 45 MB, out of one process's memory into new memory of another.
`buffer_mb_s` sends one buffer of 256 KiB again and again into another one, which never leave the processor's cache:
what the loopback itself can do.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

__all__ = ["blob_mb_s", "buffer_mb_s"]

_PIECE = 256 * 1024
_PIECES = 4096  # 1 GiB
_BLOB = 45 * 10**6

Receive = Callable[[socket.socket], int]  # until the peer closes; the bytes that came


def blob_mb_s(repeats: int = 5) -> tuple[float, ...]:
    """MB/s of a model-sized blob, once per repeat."""
    blob = os.urandom(_BLOB)
    return tuple(_once(lambda sender: sender.sendall(blob), _into_new_memory) for _ in range(repeats))


def buffer_mb_s(repeats: int = 5) -> tuple[float, ...]:
    """MB/s of send and recv_into with the same two buffers, once per repeat."""
    return tuple(_once(_send_pieces, _into_one_buffer) for _ in range(repeats))


def _send_pieces(sender: socket.socket) -> None:
    piece = bytes(_PIECE)
    for _ in range(_PIECES):
        sender.sendall(piece)


def _into_one_buffer(receiver: socket.socket) -> int:
    buffer, received = bytearray(_PIECE), 0
    while count := receiver.recv_into(buffer):
        received += count
    return received


def _into_new_memory(receiver: socket.socket) -> int:
    memory, received = memoryview(bytearray(_BLOB)), 0
    while received < _BLOB and (count := receiver.recv_into(memory[received : received + _PIECE])):
        received += count
    return received


def _once(send: Callable[[socket.socket], None], receive: Receive) -> float:
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        with socket.create_connection(listener.getsockname()) as sender:
            send(sender)
        os._exit(0)
    receiver, _ = listener.accept()
    began = time.monotonic()
    received = receive(receiver)
    seconds = time.monotonic() - began
    os.waitpid(child, 0)
    receiver.close()
    listener.close()
    return received / 1e6 / seconds
