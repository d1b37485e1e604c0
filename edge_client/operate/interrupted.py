"""How a command ends that Ctrl-C has stopped."""

from __future__ import annotations

import sys
from collections import namedtuple

__all__ = ["end"]

INTERRUPTED = 130


def end(program: str, interrupt: KeyboardInterrupt) -> int:
    """Say it in one line, and return the exit code.

    An interrupt that falls into code which Python compiles from text, as many imports do, makes the interpreter end by
    SIGINT although it was caught, unless more such code runs afterwards: that of a named tuple.
    """
    namedtuple("Nothing", ())
    print(f"{program}: {str(interrupt) or 'stopped by Ctrl-C'}", file=sys.stderr)
    return INTERRUPTED
