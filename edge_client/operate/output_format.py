"""The option `--format` of all commands: a table for people, JSON for programs, and what a command adds."""

from __future__ import annotations

import argparse

__all__ = ["add_format"]


def add_format(parser: argparse.ArgumentParser, *more: str) -> argparse.ArgumentParser:
    """Add the option; `more` are formats beside table and json. `text` is another word for `table`."""
    parser.add_argument(
        "--format", type=_spelled, choices=["table", *more, "json"], default="table", help="default: %(default)s"
    )
    return parser


def _spelled(word: str) -> str:
    return "table" if word == "text" else word
