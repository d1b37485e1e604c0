"""How commands reach the running coordinator: JSON lines over `STATE/control.sock`, which only its owner may open.

An answer that takes long is made and sent by a thread (`Later`), while the loop goes on.
Covers: both ends of the socket, errors on their way back. Does not cover: what the lines hold (`control_messages`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coordinator.control_messages import Request, parse_answer, request_map
from coordinator.run_details import plain
from edge_client.errors import (
    ConflictError,
    FedfitError,
    InputError,
    MachineError,
    NetworkError,
    NoSuchNameError,
)

__all__ = ["Answer", "ControlServer", "Later", "NotRunningError", "ask", "exchange", "socket_path"]

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


@dataclass(frozen=True, slots=True)
class Later:
    """An answer that is made in a thread beside the loop; `make` returns its record, or raises a FedfitError."""

    make: Callable[[], object]


class ControlServer:
    """Watched by the service's loop: `fds` to wait for, `serve` for those that are readable."""

    def __init__(self, state_dir: Path, answer: Answer) -> None:
        self._path = socket_path(state_dir)
        self._answer_to = answer
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self._busy: set[int] = set()  # clients that the thread answers
        self._beside: ThreadPoolExecutor | None = None  # started when it is needed; one request after the other
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
        return [self._listener.fileno(), *(fd for fd in list(self._clients) if fd not in self._busy)]

    def serve(self, ready: list[int]) -> None:
        """Take new clients and answer complete lines."""
        if self._listener.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                client, _ = self._listener.accept()
                client.settimeout(1.0)
                self._clients[client.fileno()] = (client, bytearray())
        for fd in [fd for fd in ready if fd in self._clients and fd not in self._busy]:
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
                answer = self._answer(line)
                if isinstance(answer, Later):
                    self._busy.add(fd)
                    done = self._pool().submit(self._answer_beside, fd, client, answer)
                    done.add_done_callback(lambda future: future.result())  # a bug of ours is logged with its traceback
                    return  # a second request of this client is read after the answer
                client.sendall(_encoded(answer))
        except OSError:
            client.close()
            del self._clients[fd]

    def _pool(self) -> ThreadPoolExecutor:
        if self._beside is None:
            self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answers")
        return self._beside

    def _answer_beside(self, fd: int, client: socket.socket, later: Later) -> None:
        try:
            with contextlib.suppress(OSError):  # the client is gone: the loop reads the end of its connection
                client.sendall(_encoded(self._made(later.make)))
        finally:
            self._busy.discard(fd)

    @staticmethod
    def _made(make: Callable[[], object]) -> Json:
        try:
            return {"ok": True, "result": make()}
        except FedfitError as error:
            return {"ok": False, "error": type(error).__name__, "message": str(error)}

    def _answer(self, line: bytes) -> Json | Later:
        try:
            try:
                asked = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"not JSON: {error}") from None
            if not isinstance(asked, dict):
                raise InputError(f"expected a JSON object, got {type(asked).__name__}")
            result = self._answer_to(asked)
            return result if isinstance(result, Later) else {"ok": True, "result": result}
        except FedfitError as error:
            return {"ok": False, "error": type(error).__name__, "message": str(error)}

    def close(self) -> None:
        """Stop listening."""
        if self._beside is not None:
            self._beside.shutdown(cancel_futures=True)
        for client, _ in self._clients.values():
            client.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)


def _encoded(answer: Json) -> bytes:
    return json.dumps(answer, default=plain).encode() + b"\n"


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
