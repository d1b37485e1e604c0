"""Commands as a person types them: the same `main`, in the process of the test, which spares an interpreter's start.

Covers: all that ends by itself. Does not cover: `start`, which takes over signals and logging and gets a process.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout

import pytest

from coordinator.cli import main as coordinator_cli
from edge_client.cli import main as edge_client_cli

_MAIN = {"coordinator": coordinator_cli.main, "edge_client": edge_client_cli.main}


def typed(
    package: str, *arguments: object, stdin: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The exit code and all that was said."""
    words = [str(argument) for argument in arguments]
    if words[:1] == ["start"]:
        return in_a_process(package, *words, stdin=stdin, environment=environment)
    said, told = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(told):
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        try:
            code = _MAIN[package](words)
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
    return subprocess.CompletedProcess([package, *words], code, said.getvalue(), told.getvalue())


def in_a_process(
    package: str, *arguments: object, stdin: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", package, *(str(argument) for argument in arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **(environment or {})},
    )


def ok(package: str, *arguments: object, stdin: str = "") -> str:
    """What a command said that has to succeed."""
    done = typed(package, *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout
