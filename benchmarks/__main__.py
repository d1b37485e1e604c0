"""`python -m benchmarks [NAME ...] [--quick]`: measure, print a table, write `benchmarks/results/NAME.json`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable

from benchmarks import figures

# name -> module and function; imported when asked for
KNOWN = {
    "idle_daemon": ("idle_daemon", "measure"),
    "aggregation_memory": ("aggregation_memory", "measure"),
    "round_transfer": ("round_transfer", "big"),
    "small_round": ("round_transfer", "small"),
    "wire_bytes": ("wire_bytes", "measure"),
    "restart": ("restart", "measure"),
    "store_size": ("store_size", "measure"),
    "thousand_devices": ("thousand_devices", "measure"),
    "fleet_size": ("fleet_size", "rounds"),
    "hello_storm": ("fleet_size", "storm"),
    "viewer": ("fleet_size", "viewer"),
    "first_fleet": ("first_fleet", "measure"),
    "memory_prediction": ("memory_prediction", "measure"),
    "memory_budget": ("memory_budget", "measure"),
    "accelerator_memory": ("accelerator_memory", "measure"),
    "promise": ("promise", "measure"),
    "fedepth_memory": ("fedepth_memory", "measure"),
    "fedin_memory": ("fedin_memory", "measure"),
    "method_bytes": ("method_bytes", "measure"),
    "knowledge_bytes": ("knowledge_bytes", "measure"),
    "velo_timeline": ("velo_timeline", "measure"),
    "training_round": ("training_round", "measure"),
    "simulator": ("simulator", "measure"),
    "thousand_virtual": ("thousand_virtual", "measure"),
    "recompute": ("recompute", "measure"),
    "aggregation_speed": ("aggregation_speed", "measure"),
    "training_step": ("training_step", "measure"),
    "inco_transform": ("inco_transform", "measure"),
    "similarity": ("similarity", "measure"),
    "method_time": ("method_time", "measure"),
    "install": ("install", "measure"),
    "onnx": ("onnx", "measure"),
    "live_page": ("live_page", "measure"),
}


def main() -> int:
    """0 if every goal was met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(KNOWN)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; results go to NAME.quick.json")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in KNOWN]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(KNOWN)}")
    met = [_measure(name, quick=options.quick) for name in options.names or KNOWN]
    return 0 if all(met) else 1


def _measure(name: str, *, quick: bool) -> bool:
    print(f"== {name}", flush=True)
    module, function = KNOWN[name]
    measure: Callable[..., list[figures.Figure]] = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    facts = figures.machine()
    found = measure(quick=quick)
    print(figures.table(found))
    print(f"   {figures.save(name, found, facts, quick=quick)}\n", flush=True)
    return all(figure.met is not False for figure in found)


if __name__ == "__main__":
    sys.exit(main())
