"""What the verbs of `coordinator` have in common: the state directory, the format, how an answer is shown."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from coordinator.run_details import plain
from coordinator.state import default_state_dir
from edge_client.operate.output_format import add_format

__all__ = ["add_state_dir", "formatted", "listing", "show", "show_list", "terminal_columns", "warn"]

T = TypeVar("T")


def add_state_dir(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A command that reaches a coordinator, or its files."""
    parser.add_argument(
        "--state-dir", type=Path, default=default_state_dir(), metavar="DIR", help="default: %(default)s"
    )
    return parser


def formatted(parser: argparse.ArgumentParser, *more: str) -> argparse.ArgumentParser:
    """A command that prints data; `more` are formats beside table and json."""
    return add_format(parser, *more)


def listing(parser: argparse.ArgumentParser) -> None:
    """A command that prints a list."""
    formatted(parser).add_argument("-q", "--quiet", action="store_true", help="names only")


def show(options: argparse.Namespace, data: T, table: Callable[[T], str]) -> None:
    """Print an answer, a record or plain data, in the format that was asked for."""
    print(json.dumps(data, indent=1, default=plain) if options.format == "json" else table(data))


def show_list(
    options: argparse.Namespace, rows: Sequence[T], table: Callable[[Sequence[T]], str], *, name: Callable[[T], str]
) -> None:
    """Print a list, or with `-q` only the name of each row."""
    if options.quiet:
        print("".join(f"{name(row)}\n" for row in rows), end="")
    else:
        show(options, rows, table)


def terminal_columns() -> int | None:
    """How wide the reader's terminal is; None: a file or another program reads, which gets whole lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def warn(texts: Iterable[str]) -> None:
    """Tell what is probably not wanted, each thing once."""
    for text in dict.fromkeys(texts):
        print(f"warning: {text}", file=sys.stderr)
