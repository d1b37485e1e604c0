"""The options of `coordinator demo`; the demo itself loads much more (`coordinator.cli.demo`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from coordinator.cli.options import formatted, show

__all__ = ["add_options"]


def add_options(demo: argparse.ArgumentParser) -> None:
    """Add the options of `demo`."""
    formatted(demo).set_defaults(do=_demo)
    demo.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    demo.add_argument("--seed", type=int, default=1, metavar="N", help="default: %(default)s")
    demo.add_argument("--tls", action="store_true", help="encrypt the connections")
    demo.add_argument("--keep", type=Path, metavar="DIR", help="keep all state below DIR (default: a temporary folder)")
    demo.add_argument("--keep-open", action="store_true", help="leave the live page open at the end, until Ctrl-C")
    demo.add_argument("--through", default=None, help=argparse.SUPPRESS)


def _demo(options: argparse.Namespace) -> None:
    from coordinator.cli import demo

    typed = demo.DemoOptions(
        rounds=options.rounds,
        seed=options.seed,
        tls=options.tls,
        keep=options.keep,
        keep_open=options.keep_open,
        through=options.through,
    )
    demo.run_demo(typed, lambda result: show(options, result, demo.describe))
