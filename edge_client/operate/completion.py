"""Completion in bash, zsh and fish: `completion SHELL` prints a script, `completion --install` writes it to its place.

The script has the same few lines for both programs: at each tab it asks the program itself (`complete WORDS`), so that
it never shows what the installed version does not have.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edge_client import durable
from edge_client.errors import InputError
from edge_client.operate.command_line import Command, make_parser

__all__ = ["SHELLS", "add_options", "add_words", "candidates", "install", "script"]

_BASH = """\
_{function}() {{
    local IFS=$'\\n'
    COMPREPLY=($({program} complete -- "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -o bashdefault -F _{function} {program}
"""
_ZSH = """\
#compdef {program}
_{function}() {{
    local -a found
    found=("${{(@f)$({program} complete -- "${{(@)words[2,CURRENT]}}" 2>/dev/null)}}")
    if [[ -n "$found" ]]; then compadd -- $found; else _files; fi
}}
compdef _{function} {program}
"""
_FISH = """\
function __{function}
    set -l words (commandline -opc) (commandline -ct)
    {program} complete -- $words[2..-1] 2>/dev/null
end
complete -c {program} -a '(__{function})'
"""
SHELLS: Mapping[str, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_NAMES = {  # an option whose values are names -> what lists them, without torch
    "--model": "edge_client.models.registry:names",
    "--method": "edge_client.methods.registry:names",
}


def add_options(parser: argparse.ArgumentParser, program: Command) -> None:
    """Add the options of `completion`."""
    parser.add_argument("shell", nargs="?", choices=list(SHELLS), metavar="bash|zsh|fish", help="default: your shell")
    parser.add_argument("--install", action="store_true", help="write the script to where the shell looks for it")
    parser.set_defaults(do=lambda options: _completion(options, program.name))


def add_words(parser: argparse.ArgumentParser, program: Command) -> None:
    """Add the options of `complete`, which the scripts call: the words that were typed so far, without the program."""
    parser.add_argument("words", nargs="*")

    def complete(options: argparse.Namespace) -> None:
        print("".join(f"{word}\n" for word in candidates(program, options.words)), end="")

    parser.set_defaults(do=complete)


def _completion(options: argparse.Namespace, program: str) -> None:
    shell = options.shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise InputError(f"which shell is it? type one of: {program} completion bash, zsh or fish")
    if not options.install:
        print(script(shell, program), end="")
        return
    path = install(shell, program)
    print(f"{path}  (open a new terminal, then type {program} and press Tab)")
    if shell == "zsh":
        print(f"if nothing happens, put this line above compinit in ~/.zshrc: fpath=({path.parent} $fpath)")


def script(shell: str, program: str) -> str:
    """What the shell has to read."""
    return SHELLS[shell].format(program=program, function=program.replace("-", "_") + "_complete")


def install(shell: str, program: str) -> Path:
    """Write the script into the user's folder for it; returns its path."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = {
        "bash": data / "bash-completion/completions" / program,
        "zsh": data / "zsh/site-functions" / f"_{program}",
        "fish": config / "fish/completions" / f"{program}.fish",
    }[shell]
    with durable.disk_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script(shell, program), encoding="utf-8")
    return path


def candidates(program: Command, words: Sequence[str]) -> list[str]:
    """What the last word may become; empty where a file name, or anything else, is expected."""
    *before, last = words or [""]
    parser, previous = make_parser(program), ""
    for word in before:
        parser, previous = (parser.parsers()[word], "") if word in parser.parsers() else (parser, word)
    parser.fill()
    action = parser._option_string_actions.get(previous)
    if action is not None and action.nargs != 0:
        candidates = [str(choice) for choice in action.choices or ()] or _names(previous)
    elif last.startswith("-"):
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        candidates = [name for action in shown for name in action.option_strings]
        candidates = [name for name in candidates if name.startswith("--")]
    else:
        candidates = [command.name for command in parser.command.commands if command.is_listed]
    return [word for word in candidates if word.startswith(last)]


def _names(option: str) -> list[str]:
    module, _, function = _NAMES.get(option, "").partition(":")
    if not module:
        return []
    names: Callable[[], Sequence[str]] = getattr(importlib.import_module(module), function)
    return list(names())
