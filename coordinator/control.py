"""How commands reach the running coordinator: JSON lines over `STATE/control.sock`, which only its owner may open.

Covers: both ends of the socket, errors on their way back. Does not cover: what the lines hold (`control_messages`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from coordinator.control_messages import Request, parse_answer, plain, request_map
from edge_client.errors import (
    ConflictError,
    FedfitError,
    InputError,
    MachineError,
    NetworkError,
    NoSuchNameError,
)

__all__ = ["Answer", "ControlServer", "NotRunningError", "ask", "exchange", "socket_path"]

log = logging.getLogger(__name__)

_MAX_LINE_BYTES = 4 << 20  # of a request
_MAX_ANSWER_BYTES = 64 << 20
_TIMEOUT_S = 60.0
_ERRORS: dict[str, type[FedfitError]] = {
    cls.__name__: cls for cls in (ConflictError, InputError, MachineError, NetworkError, NoSuchNameError)
}

A = TypeVar("A")

Json = dict[str, Any]
Answer = Callable[[Json], object]  # a request as it arrived -> the record of its answer; raises a FedfitError


class NotRunningError(MachineError):
    """No coordinator runs on this state directory."""


def socket_path(state_dir: Path) -> Path:
    """Where the coordinator listens."""
    return state_dir / "control.sock"


class ControlServer:
    """Watched by the service's loop: `fds` to wait for, `serve` for those that are readable."""

    def __init__(self, state_dir: Path, answer: Answer) -> None:
        self._path = socket_path(state_dir)
        self._answer_to = answer
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        with _short_path(self._path) as path:
            previous = os.umask(0o177)
            try:
                self._listener.bind(path)
            finally:
                os.umask(previous)
        self._listener.listen(16)
        self._listener.setblocking(False)

    def fds(self) -> list[int]:
        """What to watch."""
        return [self._listener.fileno(), *self._clients]

    def serve(self, ready: list[int]) -> None:
        """Take new clients and answer complete lines."""
        if self._listener.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                client, _ = self._listener.accept()
                client.settimeout(1.0)
                self._clients[client.fileno()] = (client, bytearray())
        for fd in [fd for fd in ready if fd in self._clients]:
            self._read(fd)

    def _read(self, fd: int) -> None:
        client, buffer = self._clients[fd]
        try:
            piece = client.recv(65_536)
            buffer += piece
            if not piece or len(buffer) > _MAX_LINE_BYTES:
                raise ConnectionError
            while b"\n" in buffer:
                line, _, rest = bytes(buffer).partition(b"\n")
                buffer[:] = rest
                client.sendall(json.dumps(self._answer(line), default=plain).encode() + b"\n")
        except OSError:
            client.close()
            del self._clients[fd]

    def _answer(self, line: bytes) -> Json:
        try:
            try:
                asked = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"not JSON: {error}") from None
            if not isinstance(asked, dict):
                raise InputError(f"expected a JSON object, got {type(asked).__name__}")
            return {"ok": True, "result": self._answer_to(asked)}
        except FedfitError as error:
            return {"ok": False, "error": type(error).__name__, "message": str(error)}

    def close(self) -> None:
        """Stop listening."""
        for client, _ in self._clients.values():
            client.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)


def ask(state_dir: Path, asked: Request[A]) -> A:
    """Ask the running coordinator; raises the error that it answered, or `NotRunningError`."""
    return parse_answer(asked, exchange(state_dir, request_map(asked)))


def exchange(state_dir: Path, asked: Json) -> Json:
    """Send a request and return the answer, both as they travel; raises as `ask` does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            with _short_path(socket_path(state_dir)) as path:
                connection.connect(path)
            connection.sendall(json.dumps(asked, default=plain).encode() + b"\n")
            with connection.makefile("rb") as lines:
                line = lines.readline(_MAX_ANSWER_BYTES)
            if len(line) == _MAX_ANSWER_BYTES:
                raise MachineError(
                    f"the coordinator's answer to {asked['request']!r} is longer than {_MAX_ANSWER_BYTES} bytes"
                )
            answer = json.loads(line or b"{}")
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise NotRunningError(
                f"no coordinator runs on {state_dir}; start it with: coordinator start --state-dir {state_dir}"
            ) from None
        except OSError as error:
            raise MachineError(f"the coordinator on {state_dir} does not answer: {error}") from error
        except ValueError:
            answer = {}
    if answer.get("ok"):
        result: Json = answer["result"]
        return result
    kind = _ERRORS.get(str(answer.get("error")), MachineError)
    raise kind(answer.get("message", "the coordinator ended meanwhile"))


@contextlib.contextmanager
def _short_path(path: Path) -> Any:
    """A Unix socket's path is limited to about 100 bytes: go through the folder's descriptor when it is longer."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
