"""The command `coordinator`: run a federation, enrol devices, start runs, look at them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.cli.compare import add_compare
from coordinator.cli.devices import add_device_verbs
from coordinator.cli.folders import add_verbs
from coordinator.cli.methods import add_methods
from coordinator.cli.models import add_models
from coordinator.cli.options import formatted, show, verb
from coordinator.cli.runs import add_run
from coordinator.cli.server import add_service_verbs, add_start_options, start_options
from coordinator.cli.simulate import add_simulate
from coordinator.server import launch
from edge_client import __version__, logs
from edge_client.errors import FedfitError

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coordinator", description="Run a federation of differently sized devices.")
    parser.add_argument("-V", "--version", action="version", version=f"coordinator {__version__}")
    nouns = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_start(nouns)
    _add_demo(nouns)
    add_device_verbs(nouns)
    add_run(nouns)
    add_methods(nouns)
    add_models(nouns)
    add_simulate(nouns)
    add_compare(nouns)
    add_verbs(nouns)
    add_service_verbs(nouns)
    return parser


def _add_start(nouns: Any) -> None:
    start = verb(nouns, "start", _start, "run the coordinator, with its own broker unless --broker names one")
    add_start_options(start)
    start.add_argument("--heartbeat", type=float, default=10.0, metavar="S", help=argparse.SUPPRESS)


def _add_demo(nouns: Any) -> None:
    demo = formatted(verb(nouns, "demo", _demo, "broker, coordinator and devices as real processes on this machine"))
    demo.add_argument("--rounds", type=int, default=5)
    demo.add_argument("--seed", type=int, default=1)
    demo.add_argument("--tls", action="store_true", help="encrypt the connections")
    demo.add_argument("--keep", type=Path, metavar="DIR", help="keep all state below DIR (default: a temporary folder)")
    demo.add_argument("--through", default=None, help=argparse.SUPPRESS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if sys.platform == "win32":
        print("coordinator: Windows is not supported; use Linux", file=sys.stderr)
        return 4
    options = _parser().parse_args(arguments)
    try:
        options.do(options)
        sys.stdout.flush()
    except FedfitError as error:
        print(f"coordinator: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush complains
        return 141
    return 0


def _start(options: argparse.Namespace) -> None:
    from coordinator.requests.commands import Commands

    context = logs.Context()
    logs.configure(options.log_format, context)
    launch.start(start_options(options), lambda service: Commands(service).handle, context)


def _demo(options: argparse.Namespace) -> None:
    from coordinator.cli import demo

    result = demo.run_demo(
        demo.DemoOptions(
            rounds=options.rounds, seed=options.seed, tls=options.tls, keep=options.keep, through=options.through
        )
    )
    show(options, result, demo.describe)


if __name__ == "__main__":
    sys.exit(main())
