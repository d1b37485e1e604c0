"""Runs in the simulator for the bytes that they move: real sessions, messages, containers and chunks, counted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Moved", "simulated"]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Of a run with one device, as the coordinator counted it: of the rounds after the first the fewest."""

    up: int
    down: int
    once: int  # down, in the first round and not again


def simulated(method: str, folder: Path, *, settings: Mapping[str, object], rounds: int = 3) -> Moved:
    """One device that trains four batches in a round; `settings` are keys of the run file, or the method's."""
    out = folder / method.replace("+", "-")
    flags = ["--method", method, "--data", "digits", "--devices", "1", "--rounds", str(rounds), "--workers", "1"]
    fixed = {"train.batch": 64, "train.max-steps": 4, "evaluate.every": 0}
    for key, value in {**fixed, **settings}.items():
        flags += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    command = [sys.executable, "-m", "coordinator", "simulate", *flags, "--format", "json", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, timeout=1800, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{method}: {done.stderr.decode()[-500:]}")
    return _read(out)


def _read(out: Path) -> Moved:
    """Of a finished run."""
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    up, down = (min(line[way] for line in lines[1:]) for way in ("bytes_up", "bytes_down"))
    return Moved(up=up, down=down, once=max(0, lines[0]["bytes_down"] - down))
