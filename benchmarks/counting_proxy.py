"""A TCP proxy in a thread that counts the bytes it passes on, both ways."""

from __future__ import annotations

import select
import socket
import threading

__all__ = ["CountingProxy"]

_PIECE = 1 << 16


class CountingProxy:
    """Passes connections on to a port of this machine."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_bytes = 0
        self._stopping = False
        self._peers: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> CountingProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()
        for sock in (self._listener, *self._peers):
            sock.close()

    def _serve(self) -> None:
        while not self._stopping:
            ready, _, _ = select.select([self._listener, *self._peers], [], [], 0.1)
            for sock in ready:
                if sock is self._listener:
                    self._connect()
                elif sock in self._peers:  # its peer may have ended in this turn
                    self._pass_on(sock)

    def _connect(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._target))
        self._peers[client], self._peers[server] = server, client

    def _pass_on(self, sock: socket.socket) -> None:
        peer = self._peers[sock]
        try:
            piece = sock.recv(_PIECE)
            peer.sendall(piece)
        except OSError:
            piece = b""
        self.num_bytes += len(piece)
        if not piece:
            for end in (sock, peer):
                del self._peers[end]
                end.close()
