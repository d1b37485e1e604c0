"""Named points where a test may kill this process or make its disk fail.

`FEDFIT_FAULT` is a comma-separated list of `kind:point[:n][@round]`: at the n-th hit (default 1) of `point`, optionally
only while the process works on that round, do `kind`:

    kill          SIGKILL to this process
    kill-broker   SIGKILL to the process whose id stands in the file `FEDFIT_FAULT_PIDFILE`
    stop          SIGSTOP to this process: it goes on when the test says so
    enospc, eio   raise that OSError, as a full or a dying disk would
    halve         at every hit: `scale` gives one half (named twice: a quarter), so that a prediction is wrong

`FEDFIT_FAULT_LOG` names a file that remembers, over restarts, which faults have fired: each fires once (`halve`: in
every process), and a test whose point was never hit finds no line. Without `FEDFIT_FAULT` a point costs one comparison.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["bound", "in_round", "load", "point", "scale"]

_KINDS = "kill|kill-broker|stop|enospc|eio|halve"


@dataclass(slots=True)
class _Fault:
    text: str
    kind: str
    point: str
    remaining: int
    round: int | None


def _parse(text: str) -> _Fault:
    match = re.fullmatch(rf"({_KINDS}):([a-z0-9._-]+)(?::([1-9][0-9]*))?(?:@([0-9]+))?", text)
    if match is None:
        raise ValueError(f"FEDFIT_FAULT: expected {_KINDS}:<point>[:n][@round], got {text!r}")
    return _Fault(text, match[1], match[2], int(match[3] or 1), int(match[4]) if match[4] else None)


def _read() -> list[_Fault] | None:
    faults = os.environ.get("FEDFIT_FAULT")
    if not faults:
        return None
    fired: set[str] = set()
    log = os.environ.get("FEDFIT_FAULT_LOG")
    if log and os.path.exists(log):
        with open(log, encoding="utf-8") as lines:
            fired = {line.strip() for line in lines}
    return [_parse(text) for text in faults.split(",") if text not in fired or text.startswith("halve:")]


_faults = _read()
_round: int | None = None


def load() -> None:
    """Read the environment again, as a new process would: this one is a fork of another."""
    global _faults
    _faults = _read()


def in_round(number: int | None) -> None:
    """Set the round that this process works on, for faults that name one."""
    global _round
    _round = number


def bound(action: Callable[[], None]) -> Callable[[], None]:
    """The action, to be done later: the faults on its way are those of the round that this process works on now."""
    if _faults is None:
        return action
    number = _round

    def act() -> None:
        before = _round
        in_round(number)
        try:
            action()
        finally:
            in_round(before)

    return act


def point(name: str) -> None:
    """A step at which a test may inject a fault; does nothing in production."""
    if _faults is None:
        return
    for fault in _faults:
        if fault.point == name and fault.round in (None, _round) and fault.remaining > 0 and fault.kind != "halve":
            fault.remaining -= 1
            if fault.remaining == 0:
                _fire(fault)


def scale(name: str) -> float:
    """The factor with which a test falsifies a number at this step; 1 in production."""
    factor = 1.0
    for fault in _faults or ():
        if fault.kind == "halve" and fault.point == name and fault.round in (None, _round):
            factor /= 2
            if fault.remaining > 0:
                fault.remaining = 0
                _note(fault)
    return factor


def _note(fault: _Fault) -> None:
    log = os.environ.get("FEDFIT_FAULT_LOG")
    if log:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, f"{fault.text}\n".encode())
        os.close(fd)


def _fire(fault: _Fault) -> None:
    _note(fault)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "kill-broker":
        with open(os.environ["FEDFIT_FAULT_PIDFILE"], encoding="ascii") as f:
            os.kill(int(f.read().split()[0]), signal.SIGKILL)
    else:
        code = errno.ENOSPC if fault.kind == "enospc" else errno.EIO
        raise OSError(code, f"{os.strerror(code)} (injected at {fault.point})")
