"""Fault points: what may be asked for, and when they strike."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edge_client import faults


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"from edge_client import faults\n{code}"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill",
        "kill:",
        "boom:x",
        "kill:x:0",
        "kill:x:-1",
        "kill:x:y",
        "kill:x:1:2",
        "kill:x@",
        "kill:x@r",
        "eio:x y",
    ],
)
def test_what_is_not_a_fault_is_said_to_be_none(text: str) -> None:
    """A typo in a test must not be a test that never strikes."""
    with pytest.raises(ValueError, match="FEDFIT_FAULT: expected"):
        faults._parse(text)


def test_a_fault_has_its_kind_point_number_and_round() -> None:
    """The defaults are the first hit and any round."""
    fault = faults._parse("kill-broker:store.update.commit:3@12")
    assert (fault.kind, fault.point, fault.remaining, fault.round) == ("kill-broker", "store.update.commit", 3, 12)
    assert (faults._parse("eio:x").remaining, faults._parse("eio:x").round) == (1, None)


def test_a_fault_strikes_at_its_nth_hit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of four."""
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:x:2")])
    struck = []
    for hit in range(4):
        faults.point("y")
        try:
            faults.point("x")
        except OSError as error:
            struck.append((hit, error.errno))
    assert struck == [(1, errno.ENOSPC)]


def test_a_fault_with_a_round_counts_only_hits_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 2."""
    monkeypatch.setattr(faults, "_faults", [faults._parse("eio:x@2")])
    monkeypatch.setattr(faults, "_round", None)
    faults.point("x")
    faults.in_round(1)
    faults.point("x")
    faults.in_round(2)
    with pytest.raises(OSError, match="injected at x"):
        faults.point("x")


def test_a_kill_fires_once_over_restarts(tmp_path: Path) -> None:
    """The log remembers it; the second process lives."""
    environment = {"FEDFIT_FAULT": "kill:x", "FEDFIT_FAULT_LOG": str(tmp_path / "log")}
    assert _run("faults.point('x')", **environment).returncode == -9
    assert _run("faults.point('x')", **environment).returncode == 0
    assert (tmp_path / "log").read_text() == "kill:x\n"


def test_a_halved_number_is_halved_in_every_process_and_noted(tmp_path: Path) -> None:
    """Named twice: a quarter; another number is as it is; no point strikes."""
    environment = {"FEDFIT_FAULT": "halve:x,halve:x:2", "FEDFIT_FAULT_LOG": str(tmp_path / "log")}
    for _ in range(2):
        done = _run("faults.point('x'); print(faults.scale('x'), faults.scale('x'), faults.scale('y'))", **environment)
        assert done.stdout.split() == ["0.25", "0.25", "1.0"]
    assert (tmp_path / "log").read_text().split() == ["halve:x", "halve:x:2"] * 2
    assert _run("print(faults.scale('x'))", FEDFIT_FAULT="").stdout == "1.0\n"


def test_a_stopped_process_goes_on_when_it_is_told(tmp_path: Path) -> None:
    """SIGSTOP, then SIGCONT."""
    command = [sys.executable, "-c", "from edge_client import faults\nfaults.point('x')"]
    process = subprocess.Popen(command, env=os.environ | {"FEDFIT_FAULT": "stop:x"})
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    assert process.wait(20) == 0


def test_a_typo_in_the_environment_ends_the_process() -> None:
    """At once, with the text."""
    done = _run("", FEDFIT_FAULT="kil:x")
    assert done.returncode == 1
    assert "got 'kil:x'" in done.stderr


def test_without_a_wish_nothing_happens() -> None:
    """Production."""
    assert _run("faults.point('x'); assert faults._faults is None", FEDFIT_FAULT="").returncode == 0
