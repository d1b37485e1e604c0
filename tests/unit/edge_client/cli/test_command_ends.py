"""How commands end when a person stops them, or has seen enough: without a traceback."""

from __future__ import annotations

import builtins
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rows import digest

from edge_client.cli import main as cli
from edge_client.client import identity

BUNDLE = identity.Bundle(
    federation="fed", device="d", brokers=("mqtt://127.0.0.1:1",), password="p" * 20, key=digest("d")
)


def _raising(error: type[BaseException]) -> Callable[[str], str]:
    def ask(question: str) -> str:
        raise error

    return ask


@pytest.mark.parametrize(("key", "code"), [(KeyboardInterrupt, 130), (EOFError, 3)], ids=["Ctrl-C", "Ctrl-D"])
def test_leave_is_not_confirmed_by_ctrl_c_or_ctrl_d(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: type[BaseException], code: int
) -> None:
    """The device is a member as before."""
    identity.join(tmp_path, BUNDLE)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "input", _raising(key))
    assert cli.main(["leave", "--state-dir", str(tmp_path)]) == code
    assert identity.load_identity(tmp_path) == BUNDLE


@pytest.mark.parametrize("command", [["edge_client", "config", "--config"], ["coordinator", "new"]])
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, command: list[str]) -> None:
    """Nobody reads the other end of the pipe any more, as with `| head`."""
    (tmp_path / "device.toml").write_text('data = { source = "digits" }')
    place = tmp_path / ("device.toml" if "config" in command else "made")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        words = [sys.executable, "-m", *command, str(place)]
        done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=60)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("command", "seen", "answer"),
    [
        ("coordinator simulate --devices 2 --rounds 500 --out {}/out", b"round 1 of", b"the same command continues"),
        ("edge_client plan --model vit-t-16", b"", b"edge-client: stopped by Ctrl-C"),
    ],
    ids=["simulate", "plan"],
)
def test_ctrl_c_in_a_terminal_shows_one_line(tmp_path: Path, command: str, seen: bytes, answer: bytes) -> None:
    """The key reaches every process of the terminal, the children too: none of them shows a stack trace."""
    words = [sys.executable, "-m", *command.format(tmp_path).split()]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "FEDFIT_CACHE_DIR": str(tmp_path / "cache")}
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests themselves run in the background
        os.execve(words[0], words, environment)
    said, pressed_at = b"", time.monotonic() + 1.0
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                piece = os.read(terminal, 65_536)
            except OSError:  # how Linux tells that nobody has the other end any more
                break
            said += piece
        if pressed_at and seen in said and time.monotonic() > pressed_at:
            os.write(terminal, b"\x03")
            pressed_at = 0.0
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert (code, b"Traceback" in said) == (130, False), said[-2000:].decode()
    assert answer in said
