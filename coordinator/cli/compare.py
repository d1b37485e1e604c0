"""`coordinator compare`: simulations side by side, with mean and spread over their seeds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from coordinator.cli.options import formatted
from coordinator.results.run_record import METRICS
from edge_client.errors import InputError

__all__ = ["add_options"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `compare`."""
    parser.set_defaults(do=_compare)
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="of a simulation, or of several in folders below"
    )
    formatted(parser, "csv", "md", "latex")
    parser.add_argument("--metric", choices=list(METRICS), default="accuracy", help="default: %(default)s")
    parser.add_argument("--target", type=float, metavar="VALUE", help="tell rounds and bytes to get there")


def _compare(options: argparse.Namespace) -> None:
    from coordinator.report import compare, compare_formats
    from coordinator.results import run_folders

    _check_target(options.metric, options.target)
    runs = [run_folders.read_run(folder) for folder in run_folders.find_runs(options.folders)]
    comparison = compare.compare(runs, metric=options.metric, target=options.target)
    text = compare_formats.FORMATS[options.format](comparison)
    if text:
        print(text)
    if options.format == "csv":  # has no place for it
        for line in compare_formats.left_out_lines(comparison):
            print(line, file=sys.stderr)


def _check_target(metric: str, target: float | None) -> None:
    wanted = "0 or more" if metric == "loss" else "0 to 1"
    if target is not None and not (0 <= target < float("inf") if metric == "loss" else 0 <= target <= 1):
        raise InputError(f"--target: expected {wanted} for {metric}, got {target:g}; it would never be reached")
