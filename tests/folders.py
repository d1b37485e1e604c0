"""Folders of simulations for tests, written by hand: small, and changed by keyword."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]

RUN = """
name = "n"
seed = {seed}
method = {{ name = "{method}"{parameters} }}
model = {{ name = "mlp", input = [1, 2, 2] }}
classes = ["no", "yes"]
stop = {{ rounds = {rounds} }}
simulate = {{ data = "digits", devices = 2, training-budgets = ["10MB", "20MB"]{simulate} }}
"""


def line(number: int, accuracy: float | None, **changes: Any) -> Json:
    """A round of two devices: 30 bytes travel in 2 s; training takes 4 of 10 MB on one and 12 of 20 MB on the other."""
    first = {"device": "d0001", "plan": "2 groups", "peak": 104_000_000, "base": 100_000_000, "samples": 7}
    second = {"device": "d0002", "plan": "full", "peak": 112_000_000, "base": 100_000_000, "samples": 9}
    told = {"round": number, "accuracy": accuracy, "bytes_up": 10, "bytes_down": 20, "seconds": 2.0}
    return told | {"devices": [first, second]} | changes


def write_run(
    folder: Path, lines: Sequence[Json], *, seed: int = 1, method: str = "fedavg", finished: bool = True, **more: str
) -> Path:
    """A run with these rounds; `parameters` and `simulate` are TOML that goes on in these tables."""
    folder.mkdir(parents=True)
    told = {"seed": seed, "method": method, "rounds": len(lines), "parameters": "", "simulate": ""} | more
    (folder / "run.toml").write_text(RUN.format(**told))
    (folder / "rounds.jsonl").write_text("".join(f"{json.dumps(found)}\n" for found in lines))
    result: Json = {"rounds": len(lines), "accuracy_before": 0.25, "reason": f"{len(lines)} rounds"}
    result |= {"model_sha256": "ab" * 32, "per_device": [{"device": "d0001", "bytes_up": 4, "bytes_down": 8}]}
    if finished:
        (folder / "result.json").write_text(json.dumps(result))
    return folder
