"""The README is true: its own commands are run as they stand, and what the pages show is what the parsers take.

Markers in the README (`<!-- file: NAME -->`, `<!-- terminal: N -->`) name the blocks. Nothing in them is replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import raw_requests

from coordinator.cli import commands as coordinator_commands
from coordinator.run_check import check_run
from edge_client.cli import commands as edge_client_commands
from edge_client.config.run_file import load_run_file
from edge_client.errors import MachineError
from edge_client.operate.command_line import make_parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "deploy").rglob("*.md"))
PROGRAMS = {"coordinator": coordinator_commands.PROGRAM, "edge-client": edge_client_commands.PROGRAM}
DEADLINE_S = 240.0  # only a failing test ever waits so long


def marked(marker: str) -> str:
    """The body of the block behind a marker."""
    found = re.findall(rf"<!-- {re.escape(marker)} -->\n```[a-z]+\n(.*?)```\n", README, re.DOTALL)
    assert len(found) == 1, f"README.md has {len(found)} blocks marked {marker!r}, expected one"
    return str(found[0])


def code_of(page: Path) -> Iterator[str]:
    """Every line of the shell blocks of a page, and everything that stands in `...`."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from (line.removeprefix("$ ").strip() for line in block.splitlines())
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", prose)


def commands_of(page: Path) -> list[list[str]]:
    """The commands of fedfit that a page shows, as words; what the shell keeps for itself is cut off."""
    commands = []
    for line in code_of(page):
        if line.partition(" ")[0] in PROGRAMS and " " in line:
            words = shlex.split(line, comments=True)
            end = next((i for i, word in enumerate(words) if re.fullmatch(r"&&?|\||[0-9]?[<>]", word)), len(words))
            commands.append(words[:end])
    return commands


class Terminal:
    """A shell in which somebody types the lines of a block; its group ends with the test."""

    def __init__(self, folder: Path, environment: dict[str, str], log: Path) -> None:
        with open(log, "wb") as output:
            self._shell = subprocess.Popen(
                ["bash", "-e"],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._log = log

    def type(self, lines: str) -> None:
        """Hand lines to the shell."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(lines.encode())
        self._shell.stdin.flush()

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.killpg(self._shell.pid, signal.SIGINT)

    def end(self) -> int:
        """Leave the shell, and its exit code."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        return self._shell.wait(30)

    def check_open(self) -> None:
        """A shell that ended had a command that failed."""
        assert self._shell.poll() is None, f"the shell ended: {self.said()}"

    def said(self) -> str:
        """All its output."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Whatever is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        if self._shell.stdin is not None and not self._shell.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._shell.stdin.close()
        self._shell.wait()


def environment_of(folder: Path) -> dict[str, str]:
    """A user who has fedfit on the path and nothing else; without an installation, `python -m` stands in for it."""
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    for command in PROGRAMS:
        script = stand_ins / command
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {command.replace("-", "_")} "$@"\n')
        script.chmod(0o755)
    (folder / "home").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FEDFIT_")}
    path = f"{Path(sys.executable).parent}:{stand_ins}:{os.environ['PATH']}"
    return {**kept, "HOME": str(folder / "home"), "PATH": path, "PYTHONPATH": str(ROOT)}


def answer(state_dir: Path, what: str, **fields: Any) -> dict[str, Any] | None:
    try:
        return raw_requests.request(state_dir, what, **fields)
    except MachineError:
        return None


def wait_until(done: Callable[[], bool], *terminals: Terminal) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < end_s, "\n".join(terminal.said() for terminal in terminals)
        for terminal in terminals:
            terminal.check_open()
        time.sleep(0.1)


@pytest.mark.broker
def test_following_the_readme_ends_with_a_trained_model(tmp_path: Path) -> None:
    """The file saved, both terminals typed as they stand: a dry run, 5 rounds of 3 devices inside 300 MB, a report."""
    folder = tmp_path / "try"
    folder.mkdir()
    (folder / "device.toml").write_text(marked("file: device.toml"), encoding="utf-8")
    environment, server = environment_of(tmp_path), folder / "server"
    first = Terminal(folder, environment, tmp_path / "first.log")
    second = Terminal(folder, environment, tmp_path / "second.log")
    try:
        first.type(marked("terminal: 1"))
        wait_until(lambda: answer(server, "status") is not None, first)
        second.type(marked("terminal: 2"))
        wait_until(lambda: "last seen" in second.said(), first, second)  # of the last command
        shown = raw_requests.request(server, "run-show", run="latest")
        second.type(marked("terminal: 2, end"))
        assert second.end() == 0, second.said()
        first.interrupt()
        assert first.end() == 0, first.said()
    finally:
        second.kill()
        first.kill()
    assert (shown["run"], shown["state"]) == ("digits-1", "finished")
    assert [model["version"] for model in shown["models"]] == [0, 1, 2, 3, 4, 5]
    assert [device["id"] for device in shown["devices"]] == ["attic", "cellar", "kitchen"]
    assert all(0 < device["peak_bytes"] <= 300e6 for device in shown["devices"])
    assert "3 of 3 devices can train; nothing was trained" in second.said()
    assert "after round 5: accuracy " in second.said()
    assert "digits-1" in (folder / "digits-1.html").read_text(encoding="utf-8")
    assert list((tmp_path / "home").rglob("fedfit*")) == []  # all of it stayed in the folder


def test_the_run_file_that_the_readme_shows_is_valid(tmp_path: Path) -> None:
    """It is read and checked as `run start` does it."""
    path = tmp_path / "run.toml"
    path.write_text(marked("file: run.toml"), encoding="utf-8")
    check_run(load_run_file(path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_is_shown_exists(page: Path) -> None:
    """The parsers take it, with its options; nothing is carried out."""
    for command, *arguments in commands_of(page):
        parser = make_parser(PROGRAMS[command])
        with contextlib.suppress(SystemExit):
            parser.parse_args(arguments)
            continue
        pytest.fail(f"{page.name}: not a command: {shlex.join([command, *arguments])}")


def test_the_readme_shows_the_commands_of_the_first_day() -> None:
    """The search above finds them: a test of nothing would pass as well."""
    shown = {tuple(words[1:3] if words[1] in ("run", "device") else words[1:2]) for words in commands_of(PAGES[0])}
    assert {("start",), ("new",), ("simulate",), ("device", "add"), ("run", "start"), ("run", "report")} <= shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_is_shown_exists(page: Path) -> None:
    """Against the targets that `make help` lists."""
    shown = {line.split()[1] for line in code_of(page) if re.match(r"make [a-z]", line)}
    assert shown <= make_targets()


def test_contributors_find_every_make_target() -> None:
    """CONTRIBUTING.md names all of them."""
    shown = {line.split()[1] for line in code_of(ROOT / "CONTRIBUTING.md") if re.match(r"make [a-z]", line)}
    assert shown == make_targets()


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name files of the repository."""
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_stays_short() -> None:
    """A newcomer reads it to the end; figures and details have pages of their own."""
    assert len(README.splitlines()) <= 150
