"""The control socket with clients that behave, and with those that do not."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from raw_requests import request

from coordinator.control import ControlServer, Later, NotRunningError, socket_path
from edge_client.errors import ConflictError, MachineError, NoSuchNameError


def _echo(asked: dict[str, Any]) -> dict[str, Any]:
    if asked["request"] == "conflict":
        raise ConflictError("it exists already")
    if asked["request"] == "unknown":
        raise NoSuchNameError.of("run", "r-9", ["r-1"])
    return {"asked": asked}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    control = ControlServer(tmp_path, _echo)
    yield control
    control.close()


def _connect(tmp_path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(socket_path(tmp_path)))
    client.settimeout(10)
    return client


def _serve_all(server: ControlServer) -> None:
    server.serve(server.fds())


def _serve_while(server: ControlServer, call: Callable[[], dict[str, Any]]) -> Any:
    """Runs `call` in a thread and the server here, as the service's loop does; readiness is not waited for."""
    outcome: list[Any] = []

    def client() -> None:
        try:
            outcome.append(call())
        except MachineError as error:
            outcome.append(error)
        except (ConflictError, NoSuchNameError) as error:
            outcome.append(error)

    thread = threading.Thread(target=client)
    thread.start()
    while thread.is_alive():
        _serve_ready(server)
    thread.join()
    return outcome[0]


def _serve_ready(server: ControlServer) -> None:
    ready, _, _ = select.select(server.fds(), [], [], 0.05)
    server.serve(ready)


def test_a_request_is_answered(server: ControlServer, tmp_path: Path) -> None:
    """What was asked comes back from the handler."""
    answer = _serve_while(server, lambda: request(tmp_path, "run-show", run="r-1"))
    assert answer == {"asked": {"request": "run-show", "run": "r-1"}}


@pytest.mark.parametrize(("what", "kind"), [("conflict", ConflictError), ("unknown", NoSuchNameError)])
def test_an_error_keeps_its_type_and_message(
    server: ControlServer, tmp_path: Path, what: str, kind: type[Exception]
) -> None:
    """So that the command ends with the right exit code."""
    error = _serve_while(server, lambda: request(tmp_path, what))
    assert type(error) is kind
    assert "r-1" in str(error) or "exists" in str(error)


def test_only_the_owner_may_open_the_socket(server: ControlServer, tmp_path: Path) -> None:
    """0600, whatever the umask is."""
    assert stat.S_IMODE(os.stat(socket_path(tmp_path)).st_mode) == 0o600
    assert server.fds()


def test_half_a_line_waits_for_its_other_half(server: ControlServer, tmp_path: Path) -> None:
    """And two lines in one piece are two requests."""
    with _connect(tmp_path) as client:
        _serve_all(server)
        client.sendall(b'{"request": ')
        _serve_ready(server)
        client.sendall(b'"a"}\n{"request": "b"}\n')
        _serve_ready(server)
        with client.makefile("rb") as lines:
            answers = [json.loads(lines.readline()) for _ in range(2)]
    assert [answer["result"]["asked"]["request"] for answer in answers] == ["a", "b"]


def test_a_client_that_vanishes_is_forgotten(server: ControlServer, tmp_path: Path) -> None:
    """Before a word, in the middle of a line, and without reading its answer."""
    for sent in (b"", b'{"request": "x', b'{"request": "x"}\n' * 3):
        client = _connect(tmp_path)
        _serve_all(server)
        if sent:
            client.sendall(sent)
        client.close()
        while len(server.fds()) > 1:
            _serve_ready(server)
    assert len(server.fds()) == 1


@pytest.mark.parametrize(
    "line", [b"no json", b"[1]", b"\xff\xfe", b"[" * 100_000, b"7", b"1" * 5000, b'{"request": "x"'], ids=range(7)
)
def test_nonsense_is_answered_as_nonsense(server: ControlServer, tmp_path: Path, line: bytes) -> None:
    """Also JSON that is too deep or too long a number for Python; the server lives on."""
    with _connect(tmp_path) as client:
        _serve_all(server)
        sender = threading.Thread(target=client.sendall, args=(line + b"\n",))
        sender.start()
        with client.makefile("rb") as lines:
            while sender.is_alive():
                _serve_ready(server)
            for _ in range(3):
                _serve_ready(server)
            answer = json.loads(lines.readline())
        sender.join()
    assert answer["ok"] is False
    assert answer["error"] == "InputError"


def test_an_endless_line_ends_its_connection(server: ControlServer, tmp_path: Path) -> None:
    """After 4 MiB without a line end."""
    client = _connect(tmp_path)
    _serve_all(server)

    def flood() -> None:
        try:
            for _ in range(100):
                client.sendall(b"x" * 65_536)
        except OSError:
            return

    sender = threading.Thread(target=flood)
    sender.start()
    while len(server.fds()) > 1:
        _serve_ready(server)
    sender.join()
    client.close()


def test_an_answer_of_many_megabytes_is_read_whole(tmp_path: Path) -> None:
    """12 MB: more than a request may have."""
    server = ControlServer(tmp_path, lambda asked: {"long": "x" * 12_000_000})
    answer = _serve_while(server, lambda: request(tmp_path, "run-show"))
    server.close()
    assert len(answer["long"]) == 12_000_000


def test_an_answer_without_an_end_is_said_to_be_one(tmp_path: Path) -> None:
    """More than 64 MiB."""
    server = ControlServer(tmp_path, lambda asked: {"long": "x" * (64 << 20)})
    error = _serve_while(server, lambda: request(tmp_path, "run-show"))
    server.close()
    assert isinstance(error, MachineError)
    assert "longer than" in str(error)


def test_a_bug_in_the_handler_is_not_called_bad_json(tmp_path: Path) -> None:
    """A `ValueError` of ours must not be hidden as the client's mistake."""

    def broken(asked: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("ours")

    server = ControlServer(tmp_path, broken)
    with _connect(tmp_path) as client:
        _serve_all(server)
        client.sendall(b"{}\n")
        with pytest.raises(ValueError, match="ours"):
            _serve_ready(server)
    server.close()


def test_without_a_coordinator_the_command_says_how_to_start_one(tmp_path: Path) -> None:
    """No socket, a stale socket, no folder."""
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotRunningError, match="coordinator start"):
            request(folder, "x")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(socket_path(tmp_path)))
    stale.close()
    with pytest.raises(NotRunningError, match="coordinator start"):
        request(tmp_path, "x")


def test_a_state_directory_with_a_long_path_works(tmp_path: Path) -> None:
    """A Unix socket's own limit is 108 bytes."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    server = ControlServer(folder, _echo)
    answer = _serve_while(server, lambda: request(folder, "x"))
    server.close()
    assert answer["asked"]["request"] == "x"
    assert not socket_path(folder).exists()


def test_an_answer_that_takes_long_holds_nobody_else(tmp_path: Path) -> None:
    """The first client's answer is made in a thread, which waits until the second client has its answer."""
    is_free, answered = threading.Event(), list[str]()

    def make() -> object:
        assert is_free.wait(20)
        answered.append(threading.current_thread().name)
        return {"slow": True}

    def handle(asked: dict[str, Any]) -> object:
        if asked["request"] == "refused":
            return Later(lambda: _echo({"request": "unknown"}))
        return Later(make) if asked["request"] == "slow" else {"slow": False}

    control = ControlServer(tmp_path, handle)
    try:
        slow, quick = _connect(tmp_path), _connect(tmp_path)
        slow.sendall(b'{"request": "slow"}\n')
        quick.sendall(b'{"request": "quick"}\n')
        quick.setblocking(False)
        data = b""
        while not data.endswith(b"\n"):
            control.serve([fd for fd in control.fds() if select.select([fd], [], [], 0.05)[0]])
            with contextlib.suppress(BlockingIOError):
                data += quick.recv(1000)
        assert json.loads(data)["result"] == {"slow": False}
        assert answered == []
        is_free.set()
        assert json.loads(slow.makefile().readline())["result"] == {"slow": True}
        assert answered[0].startswith("answers")
        refused = _connect(tmp_path)
        refused.sendall(b'{"request": "refused"}\n')
        for _ in range(2):  # accept, read
            control.serve([fd for fd in control.fds() if select.select([fd], [], [], 0.05)[0]])
        assert json.loads(refused.makefile().readline())["error"] == "NoSuchNameError"
        for client in (slow, quick, refused):
            client.close()
    finally:
        control.close()
