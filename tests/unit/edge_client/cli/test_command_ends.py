"""How commands end when a person stops them, or has seen enough: without a traceback."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
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
