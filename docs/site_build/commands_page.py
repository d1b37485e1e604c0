"""The page docs/reference/commands.md, made from the tables of both programs' commands.

`python -m docs.site_build.commands_page` writes it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from coordinator.cli import commands as coordinator_commands
from edge_client.cli import commands as edge_client_commands
from edge_client.operate.command_line import Command, CommandParser, make_parser

__all__ = ["PAGE", "main", "page"]

PAGE = Path(__file__).parents[1] / "reference/commands.md"
_HEAD = """# Commands

This page is generated from the tables of commands in `coordinator/cli/commands.py` and `edge_client/cli/commands.py`.
`COMMAND --help` prints the same on your machine. Exit codes have [a page of their own](exit-codes.md).

`--state-dir` names the folder in which a program keeps what it must not forget. Its default is the variable
`FEDFIT_STATE_DIR`, if it is set; otherwise `/var/lib/fedfit/coordinator` or `/var/lib/fedfit/device` as root, and
`~/.local/state/fedfit/coordinator` or `~/.local/state/fedfit/device` as any other user.
"""


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """The page as the tables are now."""
    parts = [_HEAD]
    for program in (coordinator_commands.PROGRAM, edge_client_commands.PROGRAM):
        parts += [f"## {program.name}\n", f"{_sentence(program.summary)}\n"]
        parts += _commands(program, make_parser(program).parsers(), program.name)
    return "\n".join(parts)


def _commands(group: Command, parsers: Mapping[str, CommandParser], words: str) -> Iterator[str]:
    for command in group.commands:
        if not command.is_listed:
            continue
        name = f"{words} {command.name}"
        if command.commands:
            yield from _commands(command, parsers[command.name].parsers(), name)
        else:
            yield f"### {name}\n"
            yield f"{_sentence(command.summary)}\n"
            yield from _options(parsers[command.name])
            yield "\n".join(["```sh", *command.examples, "```", ""])


def _options(parser: CommandParser) -> Iterator[str]:
    parser.fill()
    shown = [action for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    if shown:
        yield "\n".join(["| option | meaning |", "|---|---|", *(f"| {_names(a)} | {_help(a)} |" for a in shown), ""])


def _names(action: argparse.Action) -> str:
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    if action.option_strings:
        value = action.option_strings[-1] if action.nargs == 0 else f"{action.option_strings[-1]} {value}"
    return f"`{value}`".replace("|", "\\|")


def _help(action: argparse.Action) -> str:
    if action.dest == "state_dir":
        return "see above"
    text = (action.help or "") % {**vars(action), "prog": ""}
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


if __name__ == "__main__":
    sys.exit(main())
