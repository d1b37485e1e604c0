"""Completion: what the program answers, and what a shell makes of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typed import ok, typed

from coordinator.cli.commands import PROGRAM
from edge_client.operate.completion import SHELLS, candidates


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["d"], ["device", "demo", "doctor"]),
        (["run", "st"], ["start", "stop"]),
        (["run", "start", "--d"], ["--dry-run"]),
        (["compare", "--format", "l"], ["latex"]),
        (["simulate", "--method", "fedp"], ["fedper", "fedprox", "fedproto"]),
        (["simulate", "--model", "small"], ["small-cnn"]),
        (["run", "start", ""], []),  # a file
        (["run", "start", "--dry-run", ""], []),
        (["nothing", "x"], []),
    ],
)
def test_the_last_word_is_completed(words: list[str], found: list[str]) -> None:
    """Commands in the order of the help page, then options, then the values of options that have names."""
    assert sorted(candidates(PROGRAM, words)) == sorted(found)


def test_bash_completes_from_the_installed_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real bash loads the file and calls its function, as at a tab behind `edge-client in`."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/usr/bin/bash")
    script = tmp_path / "bash-completion/completions/edge-client"
    assert ok("edge_client", "completion", "--install").startswith(f"{script}  (open a new terminal")
    program = tmp_path / "edge-client"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m edge_client "$@"\n')
    program.chmod(0o755)
    lines = (
        f"PATH={tmp_path}:$PATH; source {script}; COMP_WORDS=(edge-client in); COMP_CWORD=1; "
        '_edge_client_complete; echo "${COMPREPLY[@]}"; complete -p edge-client'
    )
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines() == [
        "infer install-service",
        "complete -o bashdefault -o default -F _edge_client_complete edge-client",
    ]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_are_in_the_language_of_their_shell(shell: str, tmp_path: Path) -> None:
    """Each shell, where it is installed, reads its script without a complaint."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(ok("coordinator", "completion", shell))
    subprocess.run([shell, "-n", str(path)], check=True, timeout=60)


def test_an_unknown_shell_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the three that there are."""
    monkeypatch.setenv("SHELL", "/usr/bin/tcsh")
    done = typed("coordinator", "completion")
    assert (done.returncode, done.stderr) == (
        3,
        "coordinator: which shell is it? type one of: coordinator completion bash, zsh or fish\n",
    )
