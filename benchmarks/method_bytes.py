"""Bytes per round of every method: one device with the whole of a PreResNet-20, in the simulator, fp32.

Counted by the coordinator after the first round, when all that a method exchanges is on its way: messages, chunks
and their frames. What comes once, in the first round, stands apart. `python -m benchmarks.method_bytes` prints the
table of docs/reference/methods.md from the results.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.figures import RESULTS, Figure
from benchmarks.simulated_bytes import simulated
from edge_client.methods import registry

__all__ = ["differs", "measure", "table"]

_MODEL = {"model.name": "preresnet20", "model.input": [1, 8, 8]}
_SHARED = {"public": "digits", "public-samples": 64, "draft-batch": 32}
_MORE: dict[str, dict[str, object]] = {
    "draftfed": _SHARED,
    "fedmd": {key: value for key, value in _SHARED.items() if not key.endswith("batch")},
    "fedgkt": {"max-bytes": 2**20},
    "scalefl": {"slices": ["full", "exit:6", "exit:3"]},
    "splitmix": {"slices": ["full", "width:1/8"]},  # the device has all; more would only be measured
}
_WAYS = ("down", "up", "once")


def measure(*, quick: bool) -> list[Figure]:
    """Three figures for each method that is none over another."""
    names = [name for name in registry.names() if "+" not in name]
    with tempfile.TemporaryDirectory(prefix="fedfit-bytes-") as folder:
        return [figure for name in (names[:3] if quick else names) for figure in _of(name, Path(folder))]


def _of(name: str, folder: Path) -> list[Figure]:
    moved = simulated(name, folder, settings={**_MODEL, **_MORE.get(name, {})})
    found = {"down": moved.down, "up": moved.up, "once": moved.once}
    return [Figure(name=f"{name}: {way}", unit="bytes", values=(found[way],)) for way in _WAYS]


def differs(name: str) -> str:
    """What may be different from device to device."""
    slices = registry.slicing(name, {}).kinds
    if registry.plan_rules(name, {}).groups:
        return "memory: blocks are trained in groups"
    kinds = ", ".join("other models" if kind == "model" else kind for kind in slices)
    return f"{kinds}; every device has a model of its own" if not registry.has_global_model(name, {}) else kinds


def table() -> str:
    """For docs/reference/methods.md, from the results."""
    data = json.loads((RESULTS / "method_bytes.json").read_text(encoding="utf-8"))
    found = {figure["name"]: int(figure["median"]) for figure in data["figures"]}
    both = {name: found[f"{name}: down"] + found[f"{name}: up"] for name in (n.partition(":")[0] for n in found)}
    rows = [
        "| method | may differ | travels down | travels up | bytes down | bytes up | of FedAvg's | once, down |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(both):
        exchange = registry.get(name, {}).exchange
        cells = [f"`{name}`", differs(name), exchange.down, exchange.up]
        cells += [f"{found[f'{name}: {way}']:,}" for way in ("down", "up")]
        once = found[f"{name}: once"]
        cells += [f"{100 * both[name] / both['fedavg']:.3g} %", f"{once:,}" if once > 1000 else "-"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
