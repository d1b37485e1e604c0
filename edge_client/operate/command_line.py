"""The commands of a program as a table, and the parser that is made from it.

A command's module is imported when that command is typed, so `--help` and mistyped words cost little more than Python's
own start. Covers: grouped help pages that end with examples, messages that name what to type instead, exit codes.
Does not cover: what commands do, and completion in a shell (`completion`).
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from edge_client import __version__
from edge_client.errors import FedfitError, torch_failure

__all__ = ["Command", "CommandParser", "closest", "make_parser", "run"]

_USAGE = 2  # exit code of a mistyped command, as argparse has it
_CLOSED_PIPE = 141


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: either it has `options` (MODULE:FUNCTION, which adds them to its parser), or commands of its own."""

    name: str
    summary: str  # one line, for the list of commands and the top of its own page
    options: str = ""
    commands: tuple[Command, ...] = ()
    group: str = "Commands"  # the heading under which it is listed
    examples: tuple[str, ...] = ()
    is_listed: bool = True


def run(program: Command, arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name; returns the exit code."""
    if sys.platform == "win32":
        print(f"{program.name}: Windows is not supported; use Linux", file=sys.stderr)
        return 4
    try:
        options = make_parser(program).parse_args(_with_negative(sys.argv[1:] if arguments is None else arguments))
        options.do(options)
        sys.stdout.flush()
    except FedfitError as error:
        print(f"{program.name}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush complains
        return _CLOSED_PIPE
    except (ImportError, OSError) as error:
        failure = torch_failure(error)
        if failure is None:
            raise
        print(f"{program.name}: {failure}", file=sys.stderr)
        return failure.exit_code
    return 0


def make_parser(program: Command) -> CommandParser:
    """The parser of a whole program, with `--version`."""
    parser = CommandParser(command=program, prog=program.name)
    parser.add_argument("-V", "--version", action="version", version=f"{program.name} {__version__}")
    return parser


class CommandParser(argparse.ArgumentParser):
    """A parser that adds its options, or its commands, when it is first used."""

    def __init__(self, *, command: Command, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self.command = command
        self._is_filled = False

    def fill(self) -> None:
        """Import the command's module and add its options; later calls change nothing."""
        if self._is_filled:
            return
        self._is_filled = True
        if self.command.commands:
            group = self.add_subparsers(metavar="COMMAND", parser_class=CommandParser)
            for command in self.command.commands:
                group.add_parser(command.name, command=command)
            self.set_defaults(do=lambda options: print(self.format_help(), end=""))
        else:
            module, _, function = self.command.options.partition(":")
            add_options: Callable[[argparse.ArgumentParser], None] = getattr(importlib.import_module(module), function)
            add_options(self)

    def parsers(self) -> dict[str, CommandParser]:
        """The parsers of the commands below this one, by name."""
        self.fill()
        groups = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return dict(groups[0].choices) if groups else {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Fill the parser first; an unknown option is an error here, where the options of the command are known."""
        self.fill()
        if not self.command.commands:
            self._check_options(args)
        options, unknown = super().parse_known_args(args, namespace)
        if unknown and not self.command.commands:
            self.error(f"unexpected argument {unknown[0]!r}")
        return options, unknown

    def format_help(self) -> str:
        """A help page that fits the terminal: the options of a command, or the commands of a group; then examples."""
        width = max(40, shutil.get_terminal_size().columns - 2)
        self.description = textwrap.fill(_sentence(self.command.summary), width)
        self.epilog = _examples(self.command.examples)
        if not self.command.commands:
            return super().format_help()
        pieces = [
            f"usage: {self.prog} COMMAND ...",
            self.description,
            *_groups(self.command.commands, width),
            self.epilog,
            f"`{self.prog} COMMAND --help` explains a command and shows examples.",
        ]
        return "\n\n".join(piece for piece in pieces if piece) + "\n"

    def error(self, message: str) -> NoReturn:
        """Report an error in one line, instead of argparse's usage and error."""
        self.exit(_USAGE, f"{self.prog}: {message}; see: {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse's own check, with the nearest known word in the message."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        near = closest(str(value), known)
        if isinstance(action, argparse._SubParsersAction):
            listed = [command.name for command in self.command.commands if command.is_listed]
            hint = f"did you mean: {self.prog} {near}" if near else f"the commands are: {', '.join(listed)}"
            self.exit(_USAGE, f"{self.prog}: there is no command {value!r}; {hint}\n")
        hint = f"; did you mean {near!r}?" if near else ""
        raise argparse.ArgumentError(action, f"expected {_either(known)}, got {value!r}{hint}")

    def _check_options(self, words: Sequence[str]) -> None:
        """Refuse options that this command does not have; argparse would first complain about what is missing."""
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        for word in words[: words.index("--") if "--" in words else len(words)]:
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                near = closest(name, known)
                self.error(f"there is no option {name!r}" + (f"; did you mean {near!r}?" if near else ""))


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    import difflib  # only for a typo: it would cost every daemon 0.2 MB

    matches = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def _with_negative(arguments: Sequence[str]) -> list[str]:
    """`--budget -5MB` as `--budget=-5MB`: argparse would miss the value, and the answer would not say what is wrong."""
    joined: list[str] = []
    for argument in arguments:
        if re.match(r"-\d", argument) and joined and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _groups(commands: Sequence[Command], width: int) -> Iterator[str]:
    """A block per group, in the order of the table."""
    listed = [command for command in commands if command.is_listed]
    column = max(len(command.name) for command in listed) + 4
    for group in dict.fromkeys(command.group for command in listed):
        lines = [f"{group}:"]
        for command in listed:
            if command.group == group:
                head = f"  {command.name}".ljust(column)
                lines.append(textwrap.fill(command.summary, width, initial_indent=head, subsequent_indent=" " * column))
        yield "\n".join(lines)


def _examples(examples: Sequence[str]) -> str:
    return "\n".join(["examples:", *(f"  {example}" for example in examples)]) if examples else ""


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
