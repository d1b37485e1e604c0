"""Commands as tables: what the help pages show, what is loaded for them, and what a mistyped word is answered with."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typed import typed

from coordinator.cli import commands as coordinator_commands
from edge_client.cli import commands as edge_client_commands
from edge_client.operate.command_line import Command, CommandParser, make_parser

PROGRAMS = (coordinator_commands.PROGRAM, edge_client_commands.PROGRAM)


def pages(program: Command) -> Iterator[CommandParser]:
    """Every parser of a program, with those of the commands below commands."""
    waiting = [make_parser(program)]
    while waiting:
        parser = waiting.pop()
        waiting += parser.parsers().values()
        yield parser


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_page_fits_80_columns_and_ends_with_examples_that_work(
    program: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of groups end with a pointer to the commands' pages; every option says what it does."""
    monkeypatch.setenv("COLUMNS", "80")
    for parser in pages(program):
        page = parser.format_help()
        _, _, rest = page.partition("\n\n")  # argparse breaks usages where it can
        assert max(len(line) for line in rest.splitlines()) <= 80, page
        if not parser.command.is_listed:
            continue
        assert parser.command.examples or parser.command.commands, parser.prog
        if not parser.command.commands:
            assert page.rstrip().endswith(parser.command.examples[-1])
            shown = [action for action in parser._actions if action.option_strings or action.nargs == "?"]
            assert [action.dest for action in shown if action.help is None] == [], parser.prog
        for example in parser.command.examples:
            words = shlex.split(example.removeprefix("sudo ").partition(" < ")[0], comments=True)
            assert words[0] == program.name
            assert make_parser(program).parse_args(words[1:]).do is not None


@pytest.mark.parametrize(
    ("package", "words", "answer"),
    [
        (
            "coordinator",
            "run strat",
            "coordinator run: there is no command 'strat'; did you mean: coordinator run start",
        ),
        (
            "coordinator",
            "xyzzy",
            "coordinator: there is no command 'xyzzy'; the commands are: start, status, stop, new, device, run, ",
        ),
        ("coordinator", "run start a.toml --folow", "there is no option '--folow'; did you mean '--follow'?; see: "),
        (
            "coordinator",
            "compare a --format jsn",
            "--format: expected table, csv, md, latex or json, got 'jsn'; did you mean 'json'?",
        ),
        ("edge_client", "plan --modle small-cnn", "there is no option '--modle'; did you mean '--model'?"),
        ("edge_client", "jion a.join", "edge-client: there is no command 'jion'; did you mean: edge-client join"),
        ("edge_client", "status all", "edge-client status: unexpected argument 'all'; see: edge-client status --help"),
    ],
)
def test_a_mistyped_word_is_one_line_that_says_what_to_type(package: str, words: str, answer: str) -> None:
    """Exit code 2, as of every mistyped command."""
    done = typed(package, *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert answer in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [[], ["run"]])
def test_a_group_without_a_command_shows_its_page(words: list[str]) -> None:
    """The same as with --help."""
    done, asked = typed("coordinator", *words), typed("coordinator", *words, "--help")
    assert (done.returncode, done.stdout) == (0, asked.stdout)
    assert "`coordinator" in done.stdout


def test_help_loads_nothing_of_what_the_commands_do() -> None:
    """Neither the records of requests nor the client of the broker; a whole start imports 300 modules of ours."""
    code = (
        "import contextlib, io, sys\n"
        "for package in ('coordinator', 'edge_client'):\n"
        "    main = __import__(f'{package}.cli.main', fromlist=['main']).main\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        main(['--help'])\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('coordinator.', 'edge_client.'))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert set(done.stdout.split()) == {
        "coordinator.cli",
        "coordinator.cli.commands",
        "coordinator.cli.main",
        "edge_client.cli",
        "edge_client.cli.commands",
        "edge_client.cli.main",
        "edge_client.errors",
        "edge_client.operate",
        "edge_client.operate.command_line",
    }
